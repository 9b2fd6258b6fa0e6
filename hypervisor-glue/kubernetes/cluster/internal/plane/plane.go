// Package plane runs etcd, an API server, a controller manager, a scheduler and a kubelet inside a machine.
package plane

import (
	"context"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"nvme-mpt.internal/kubernetes/cluster/internal/machine"
)

const (
	// Node is the name of the node.
	Node = "worker-1"
	// RuntimeSocket is the socket of the container runtime.
	RuntimeSocket = "/var/runtime.sock"
	// KubeletDir is kubelet's directory.
	KubeletDir = "/var/lib/kubelet"
	// AuditLog has a line for each request by the driver's accounts.
	AuditLog = "/var/log/audit.log"

	configDir = "/var/lib/cluster"
	etcd      = "http://127.0.0.1:2379"
	etcdPeer  = "http://127.0.0.1:2380"
	services  = "10.96.0.0/24"
)

var (
	// ServiceAddress is the address of the service `kubernetes`, by which pods reach the API server.
	ServiceAddress = netip.MustParseAddr("10.96.0.1")
	// NodeAddress is the address of node and API server, which must not be a loopback address.
	NodeAddress = netip.MustParseAddr("192.0.2.1")
)

// auditPolicy logs the requests of the driver's accounts.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: ["system:serviceaccounts:nvme-mpt"]
  - level: None
`

// kubeletConfig disables the parts that need a dedicated node: control groups, packet filters and measurements.
const kubeletConfig = `
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://` + RuntimeSocket + `
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
oomScoreAdj: 0
readOnlyPort: 0
registerNode: true
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: "0%"}
podLogsDir: /var/log/pods
volumePluginDir: /var/lib/kubelet/volumeplugins
# A plugin that is killed often is started again at once.
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: ` + configDir + `/ca.crt}}
authorization: {mode: AlwaysAllow}
`

// Plane is a running cluster of one node.
type Plane struct {
	// Config is the client configuration of an administrator of the cluster.
	Config   *rest.Config
	programs string
	control  []*machine.Process
	kubelet  *machine.Process
	nodeFile string
}

// Start starts the control plane with the programs in the folder, and waits until the API server is ready.
func Start(ctx context.Context, programs string) (*Plane, error) {
	authority, err := newAuthority(configDir)
	if err != nil {
		return nil, fmt.Errorf("the cluster's authority: %w", err)
	}
	address := func(a netip.Addr) net.IP { return a.AsSlice() }
	err = errors.Join(
		authority.issue("apiserver", pkix.Name{CommonName: "kube-apiserver"}, address(ServiceAddress), address(NodeAddress), net.IPv4(127, 0, 0, 1)),
		authority.issue("accounts", pkix.Name{CommonName: "accounts"}),
		os.WriteFile(authority.path("audit.yaml"), []byte(auditPolicy), 0o600),
		os.WriteFile(authority.path("kubelet.yaml"), []byte(kubeletConfig), 0o600),
	)
	if err != nil {
		return nil, fmt.Errorf("the cluster's files: %w", err)
	}
	url := "https://" + NodeAddress.String()
	user := func(name string, subject pkix.Name) string {
		path, failed := authority.kubeconfig(name, url, subject)
		err = errors.Join(err, failed)
		return path
	}
	admin := user("admin", pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}})
	manager := user("manager", pkix.Name{CommonName: "system:kube-controller-manager"})
	scheduler := user("scheduler", pkix.Name{CommonName: "system:kube-scheduler"})
	node := user("node", pkix.Name{CommonName: "system:node:" + Node, Organization: []string{"system:nodes"}})
	if err != nil {
		return nil, fmt.Errorf("the cluster's users: %w", err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", admin)
	if err != nil {
		return nil, err
	}
	// The limits of the client allow the tests to create and delete fifty pods without a pause.
	config.QPS, config.Burst = 200, 400
	p := &Plane{Config: config, programs: programs, nodeFile: node}
	all := [][]string{
		{"server", "--name=etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls=" + etcd, "--advertise-client-urls=" + etcd,
			"--listen-peer-urls=" + etcdPeer, "--initial-advertise-peer-urls=" + etcdPeer, "--initial-cluster=etcd=" + etcdPeer},
		{"kube-apiserver", "--etcd-servers=" + etcd, "--bind-address=0.0.0.0", "--secure-port=443",
			"--advertise-address=" + NodeAddress.String(), "--service-cluster-ip-range=" + services,
			"--client-ca-file=" + authority.path("ca.crt"),
			"--tls-cert-file=" + authority.path("apiserver.crt"), "--tls-private-key-file=" + authority.path("apiserver.key"),
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + authority.path("accounts.pub"), "--service-account-signing-key-file=" + authority.path("accounts.key"),
			"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
			"--audit-policy-file=" + authority.path("audit.yaml"), "--audit-log-path=" + AuditLog, "--audit-log-mode=blocking"},
		{"kube-controller-manager", "--kubeconfig=" + manager, "--leader-elect=false", "--bind-address=127.0.0.1",
			"--use-service-account-credentials", "--root-ca-file=" + authority.path("ca.crt"),
			"--service-account-private-key-file=" + authority.path("accounts.key")},
		{"kube-scheduler", "--kubeconfig=" + scheduler, "--leader-elect=false", "--bind-address=127.0.0.1"},
	}
	for _, arguments := range all {
		process, err := machine.Start(arguments[0], nil, os.Environ(), filepath.Join(programs, arguments[0]), arguments[1:]...)
		if err != nil {
			return nil, err
		}
		p.control = append(p.control, process)
		if arguments[0] == "kube-apiserver" {
			if err := p.awaitAPI(ctx); err != nil {
				return nil, err
			}
		}
	}
	return p, nil
}

// awaitAPI waits until the API server is ready.
func (p *Plane) awaitAPI(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(p.Config)
	if err != nil {
		return err
	}
	for {
		if err := p.Check(); err != nil {
			return err
		}
		_, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the API server is not ready: %w", err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// StartKubelet starts kubelet, for the first time or after it was killed.
func (p *Plane) StartKubelet() error {
	process, err := machine.Start("kubelet", nil, os.Environ(), filepath.Join(p.programs, "kubelet"),
		"--kubeconfig="+p.nodeFile, "--config="+filepath.Join(configDir, "kubelet.yaml"),
		"--root-dir="+KubeletDir, "--cert-dir="+KubeletDir+"/pki",
		"--hostname-override="+Node, "--node-ip="+NodeAddress.String())
	if err != nil {
		return err
	}
	p.kubelet = process
	return nil
}

// KillKubelet kills kubelet.
func (p *Plane) KillKubelet() {
	p.kubelet.Kill()
	p.kubelet = nil
}

// Check returns an error if a program has ended unexpectedly.
func (p *Plane) Check() error {
	var failed error
	for _, process := range p.control {
		failed = errors.Join(failed, process.Check())
	}
	if p.kubelet != nil {
		failed = errors.Join(failed, p.kubelet.Check())
	}
	return failed
}

// Logs returns the last lines of the logs of all programs.
func (p *Plane) Logs() string {
	text := ""
	for _, process := range append(p.control, p.kubelet) {
		if process != nil {
			text += "--- " + process.Name() + "\n" + process.Tail() + "\n"
		}
	}
	return text
}
