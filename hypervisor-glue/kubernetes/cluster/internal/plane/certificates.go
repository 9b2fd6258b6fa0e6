package plane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// authority signs the certificates of a cluster and stores them in a folder.
type authority struct {
	folder      string
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
	issued      int64
}

func (a *authority) path(name string) string {
	return filepath.Join(a.folder, name)
}

func newAuthority(folder string) (*authority, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	a := &authority{folder: folder}
	if err := a.issue("ca", pkix.Name{CommonName: "cluster"}); err != nil {
		return nil, err
	}
	return a, nil
}

// issue writes NAME.crt and NAME.key. The first certificate issued is the authority's own.
func (a *authority) issue(name string, subject pkix.Name, addresses ...net.IP) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	a.issued++
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.issued),
		Subject:      subject,
		NotBefore:    now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: addresses,
	}
	parent, signer := a.certificate, a.key
	if parent == nil {
		template.IsCA, template.BasicConstraintsValid = true, true
		template.KeyUsage |= x509.KeyUsageCertSign
		parent, signer = template, key
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return err
	}
	if a.certificate == nil {
		if a.certificate, err = x509.ParseCertificate(certificate); err != nil {
			return err
		}
		a.key = key
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	for suffix, block := range map[string]*pem.Block{
		".crt": {Type: "CERTIFICATE", Bytes: certificate},
		".key": {Type: "PRIVATE KEY", Bytes: private},
		".pub": {Type: "PUBLIC KEY", Bytes: public},
	} {
		if err := os.WriteFile(a.path(name+suffix), pem.EncodeToMemory(block), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// kubeconfig issues a certificate for a user, and writes the file with which a program acts as that user.
func (a *authority) kubeconfig(name, url string, subject pkix.Name) (string, error) {
	if err := a.issue(name, subject); err != nil {
		return "", fmt.Errorf("certificate of %s: %w", name, err)
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["cluster"] = &clientcmdapi.Cluster{Server: url, CertificateAuthority: a.path("ca.crt")}
	config.AuthInfos["user"] = &clientcmdapi.AuthInfo{ClientCertificate: a.path(name + ".crt"), ClientKey: a.path(name + ".key")}
	config.Contexts["context"] = &clientcmdapi.Context{Cluster: "cluster", AuthInfo: "user"}
	config.CurrentContext = "context"
	path := a.path(name + ".kubeconfig")
	return path, clientcmd.WriteToFile(*config, path)
}
