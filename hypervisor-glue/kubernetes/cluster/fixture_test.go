package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"

	"nvme-mpt.internal/kubernetes/cluster/internal/cri"
	"nvme-mpt.internal/kubernetes/cluster/internal/machine"
	"nvme-mpt.internal/kubernetes/cluster/internal/plane"
	"nvme-mpt.internal/kubernetes/internal/claims"
	"nvme-mpt.internal/kubernetes/internal/devices"
	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/node"
	"nvme-mpt.internal/kubernetes/internal/server"
)

const (
	// timeout is the timeout of each wait. It exceeds any delay of a busy machine.
	timeout = 15 * time.Minute
	pause   = 50 * time.Millisecond
	// tenants is the namespace of the pods with claims, which the examples use as well.
	tenants = "default"
	// driverImage is the image of the driver that the manifest names.
	driverImage = "nvme-mpt-dra:0.1"
	cdiDir      = "/var/run/cdi"
	stateDir    = "/var/lib/nvme-mpt"
	gib         = 1 << 30
	// serverUser is the user id with which the server runs, as in the Debian package.
	serverUser = 64001
)

// drive is a drive in a sparse file.
type drive struct {
	path  string
	bytes int64
	// selector is the CEL expression by which claims select this drive.
	selector string
}

var (
	// large has space for the claims of all tests together, so that no claim waits until data of an earlier claim is erased.
	large = drive{"/var/lib/large.img", 2048 * gib, `device.capacity["nvme-mpt.internal"].size.isGreaterThan(quantity("16Gi"))`}
	small = drive{"/var/lib/small.img", 8 * gib, `device.capacity["nvme-mpt.internal"].size.isLessThan(quantity("16Gi"))`}
)

// cluster is a Kubernetes cluster in which the driver's manifests are applied, with a drive server on its node.
type cluster struct {
	plane   *plane.Plane
	client  kubernetes.Interface
	runtime *cri.Runtime
	served  *machine.Process
	server  *server.Server
	// created is called after the creation of each container with CDI devices, with the number of such containers so far.
	created atomic.Pointer[func(int)]
}

// started returns the cluster that all tests share, and starts it at the first call. The cluster ends with the machine.
var started = sync.OnceValues(start)

// theCluster returns the shared cluster. It skips the test if no cluster can be started here.
func theCluster(t *testing.T) *cluster {
	t.Helper()
	if notChecked != "" {
		t.Skipf("NOT CHECKED: %s", notChecked)
	}
	c, err := started()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, complaint := range c.runtime.Complaints() {
			t.Errorf("a container was given what it cannot use: %s", complaint)
		}
		if t.Failed() {
			t.Logf("logs of the cluster:\n%s%s--- server\n%s", c.plane.Logs(), c.runtime.Logs(), c.served.Tail())
		}
	})
	return c
}

func start() (*cluster, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c := &cluster{server: &server.Server{
		Binary: filepath.Join(image, "nvme-mpt"), StateDir: stateDir, Unit: gib, Question: timeout, Change: timeout,
	}}
	if err := c.serve(); err != nil {
		return nil, err
	}
	runtime, err := cri.Start(plane.RuntimeSocket, cri.Options{
		CDI: cdiDir, Socket: node.SocketName, Image: image,
		Programs: map[string]string{driverImage: "nvme-mpt-dra"},
		Created: func(number int) {
			if call := c.created.Load(); call != nil {
				(*call)(number)
			}
		},
	})
	if err != nil {
		return nil, err
	}
	c.runtime = runtime
	if c.plane, err = plane.Start(ctx, programs); err != nil {
		return nil, err
	}
	if c.client, err = kubernetes.NewForConfig(c.plane.Config); err != nil {
		return nil, err
	}
	if err := c.plane.StartKubelet(); err != nil {
		return nil, err
	}
	err = c.wait(ctx, "the server, the node and the account of pods", func() error {
		if !c.served.HasSaid("ready") {
			return errors.New("the server is not ready")
		}
		_, noAccount := c.client.CoreV1().ServiceAccounts(tenants).Get(ctx, "default", metav1.GetOptions{})
		// An administrator sets this label by `kubectl label`, so that the node gets a plugin.
		label := []byte(`{"metadata":{"labels":{"nvme-mpt.internal/drives":"true"}}}`)
		_, noNode := c.client.CoreV1().Nodes().Patch(ctx, plane.Node, types.MergePatchType, label, metav1.PatchOptions{})
		return errors.Join(noAccount, noNode)
	})
	if err != nil {
		return nil, err
	}
	if err := c.apply(ctx, "../manifests/nvme-mpt.yaml"); err != nil {
		return nil, err
	}
	return c, c.wait(ctx, "the drives in the API server", func() error {
		list, err := c.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, slice := range list.Items {
			if slice.Spec.Driver == names.Driver && len(slice.Spec.Devices) == 2 {
				return nil
			}
		}
		return fmt.Errorf("there are %d slices", len(list.Items))
	})
}

// serve starts `nvme-mpt serve` with the right to give sockets to other users, which the parameter `owner` of a claim requires.
func (c *cluster) serve() error {
	err := errors.Join(os.Mkdir(stateDir, 0o700), os.Chown(stateDir, serverUser, serverUser))
	arguments := []string{"serve", "--state-dir", stateDir}
	for _, drive := range []drive{large, small} {
		err = errors.Join(err, os.WriteFile(drive.path, nil, 0o600),
			os.Truncate(drive.path, drive.bytes), os.Chown(drive.path, serverUser, serverUser))
		arguments = append(arguments, "--drive", "path="+drive.path)
	}
	if err != nil {
		return err
	}
	attributes := &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: serverUser, Gid: serverUser},
		AmbientCaps: []uintptr{unix.CAP_CHOWN, unix.CAP_FOWNER},
	}
	c.served, err = machine.Start("nvme-mpt", attributes, os.Environ(), c.server.Binary, arguments...)
	return err
}

// apply creates the objects of a manifest in the cluster.
func (c *cluster) apply(ctx context.Context, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	client, err := dynamic.NewForConfig(c.plane.Config)
	if err != nil {
		return err
	}
	groups, err := restmapper.GetAPIGroupResources(c.client.Discovery())
	if err != nil {
		return fmt.Errorf("the kinds of the API server: %w", err)
	}
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), len(text))
	for {
		var object unstructured.Unstructured
		switch err := decoder.Decode(&object); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("%s: %w", path, err)
		}
		kind := object.GroupVersionKind()
		mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		var found dynamic.ResourceInterface = client.Resource(mapping.Resource)
		if mapping.Scope.Name() == "namespace" {
			namespace := object.GetNamespace()
			if namespace == "" {
				namespace = tenants
			}
			found = client.Resource(mapping.Resource).Namespace(namespace)
		}
		if _, err := found.Apply(ctx, object.GetName(), &object, metav1.ApplyOptions{FieldManager: "administrator"}); err != nil {
			return fmt.Errorf("%s of %s cannot be applied: %w", object.GetName(), path, err)
		}
	}
}

// wait waits until the condition returns no error.
func (c *cluster) wait(ctx context.Context, what string, is func() error) error {
	for deadline := time.Now().Add(timeout); ; {
		missing := is()
		if missing == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("waited in vain for %s: %w", what, missing)
		}
		if err := errors.Join(c.plane.Check(), c.served.Check(), ctx.Err()); err != nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
		time.Sleep(pause)
	}
}

// await waits until the condition returns no error. It fails the test if that takes too long.
func (c *cluster) await(t *testing.T, what string, is func() error) {
	t.Helper()
	if err := c.wait(t.Context(), what, is); err != nil {
		t.Fatal(err)
	}
}

// claim creates a pod and, from a template, the pod's own claim for a part of a drive.
func (c *cluster) claim(ctx context.Context, name string, on drive, size int64) error {
	devices := resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
		Name: "disk",
		Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "nvme-mpt",
			Selectors:       []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: on.selector}}},
			Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
				names.Size: *resource.NewQuantity(size, resource.BinarySI),
			}},
		},
	}}}
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: devices}},
	}
	if _, err := c.client.ResourceV1().ResourceClaimTemplates(tenants).Create(ctx, template, metav1.CreateOptions{}); err != nil {
		return err
	}
	return c.pod(ctx, name, corev1.PodResourceClaim{Name: "scratch", ResourceClaimTemplateName: &name})
}

// pod creates a pod with a claim.
func (c *cluster) pod(ctx context.Context, name string, claim corev1.PodResourceClaim) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			RestartPolicy:  corev1.RestartPolicyNever,
			ResourceClaims: []corev1.PodResourceClaim{claim},
			Containers: []corev1.Container{{
				Name: "vmm", Image: "vmm:1",
				Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: claim.Name}}},
			}},
		},
	}
	_, err := c.client.CoreV1().Pods(tenants).Create(ctx, pod, metav1.CreateOptions{})
	return err
}

// running checks that the pod runs, and that its container has a mounted socket folder at each of the paths and at no other.
func (c *cluster) running(ctx context.Context, name string, paths ...string) error {
	pod, err := c.client.CoreV1().Pods(tenants).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if pod.Status.Phase != corev1.PodRunning {
		return fmt.Errorf("pod %s is %s: %v", name, pod.Status.Phase, pod.Status.Conditions)
	}
	var found []string
	for _, container := range c.runtime.Containers(tenants) {
		if container.Pod == name && container.IsRunning {
			for _, mount := range container.Mounts {
				found = append(found, mount.ContainerPath)
			}
		}
	}
	if !slices.Equal(found, paths) {
		return fmt.Errorf("pod %s has %v in place of %v", name, found, paths)
	}
	return nil
}

// deletePod deletes a pod, and the template of its claim if it has one.
func (c *cluster) deletePod(ctx context.Context, name string) error {
	err := c.client.ResourceV1().ResourceClaimTemplates(tenants).Delete(ctx, name, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		err = nil
	}
	return errors.Join(err, c.client.CoreV1().Pods(tenants).Delete(ctx, name, metav1.DeleteOptions{}))
}

// gone checks that no pod has this name.
func (c *cluster) gone(ctx context.Context, name string) error {
	_, err := c.client.CoreV1().Pods(tenants).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("pod %s is there", name)
}

// use is the part of a drive that a lease has: the drive's device name, and the size.
type use struct {
	device string
	bytes  int64
}

// agree checks that the ledger and the API server have the same leases, on the same drives and with the same sizes.
func (c *cluster) agree(ctx context.Context) error {
	all, err := (claims.Cluster{Client: c.client}).List(ctx)
	if err != nil {
		return err
	}
	allocated := map[string]use{}
	for _, claim := range all {
		for index, result := range claims.Results(&claim) {
			size := result.ConsumedCapacity[names.Size]
			allocated[names.Lease(claim.UID, index)] = use{result.Device, size.Value()}
		}
	}
	capacities, err := c.server.Capacities(ctx)
	if err != nil {
		return err
	}
	leased := map[string]use{}
	for _, capacity := range capacities {
		for _, part := range capacity.Uses {
			leased[part.ID] = use{devices.Name(capacity.Drive), part.Bytes}
		}
	}
	if fmt.Sprint(allocated) != fmt.Sprint(leased) {
		return fmt.Errorf("the API server has %v, and the ledger %v", allocated, leased)
	}
	return nil
}

// clean checks that no claim is left, and no pod, function, lease, data or file of a claim.
func (c *cluster) clean(ctx context.Context) error {
	pods, err1 := c.client.CoreV1().Pods(tenants).List(ctx, metav1.ListOptions{})
	all, err2 := (claims.Cluster{Client: c.client}).List(ctx)
	functions, err3 := c.server.Functions(ctx)
	leases, err4 := c.server.Leases(ctx)
	capacities, err5 := c.server.Capacities(ctx)
	files, err6 := filepath.Glob(filepath.Join(cdiDir, "*"))
	sockets, err7 := filepath.Glob(filepath.Join(stateDir, "claims", "*"))
	if err := errors.Join(err1, err2, err3, err4, err5, err6, err7); err != nil {
		return err
	}
	var left []string
	for _, found := range []struct {
		what   string
		number int
	}{
		{"pods", len(pods.Items)}, {"claims", len(all)}, {"functions", len(functions)}, {"leases", len(leases)},
		{"CDI files", len(files)}, {"folders of sockets", len(sockets)},
		// Ended containers do not count: kubelet removes them only once a minute.
		{"running containers", len(slices.DeleteFunc(c.runtime.Containers(tenants), func(found cri.Container) bool { return !found.IsRunning }))},
	} {
		if found.number > 0 {
			left = append(left, fmt.Sprintf("%d %s", found.number, found.what))
		}
	}
	for _, capacity := range capacities {
		if capacity.Free != capacity.Bytes || len(capacity.Uses) > 0 {
			left = append(left, fmt.Sprintf("%d of %d bytes free, uses %v", capacity.Free, capacity.Bytes, capacity.Uses))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("there are %s", strings.Join(left, ", "))
	}
	return nil
}
