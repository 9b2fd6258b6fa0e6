package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	kubelet "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"nvme-mpt.internal/kubernetes/internal/cdi"
	"nvme-mpt.internal/kubernetes/internal/claims"
	"nvme-mpt.internal/kubernetes/internal/devices"
	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/node"
	"nvme-mpt.internal/kubernetes/internal/server"
	"nvme-mpt.internal/kubernetes/internal/testserver"
)

const (
	nodeName = "worker-1"
	claimUID = "00000000-0000-4000-8000-000000000001"
)

func TestMain(m *testing.M) {
	if testserver.IsCommand(os.Args) {
		os.Exit(testserver.Main(os.Args))
	}
	os.Exit(m.Run())
}

// newDriver returns a driver with its own kubelet folder, and the client of an API server in memory.
func newDriver(t *testing.T, s *server.Server, objects ...runtime.Object) (*Driver, *fake.Clientset) {
	t.Helper()
	objects = append(objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node"}})
	client := fake.NewClientset(objects...)
	// The real API server generates names for objects. The one in memory does not, so this does.
	var made atomic.Int64
	client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		if slice.Name == "" {
			slice.Name = fmt.Sprint(slice.GenerateName, made.Add(1))
		}
		return false, nil, nil
	})
	sockets := filepath.Join(s.StateDir, "c")
	folder, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	if err := os.MkdirAll(filepath.Join(folder, "plugins_registry"), 0o755); err != nil {
		t.Fatal(err)
	}
	return New(Options{
		Node: &node.Node{
			Name: nodeName, Server: s, Cluster: claims.Cluster{Client: client},
			Folder: sockets, CDI: cdi.Folder(filepath.Join(folder, "cdi")),
		},
		Client:     client,
		KubeletDir: folder,
		Interval:   10 * time.Millisecond,
	}), client
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatalf("waited in vain for %s", what)
}

// published returns the devices of all slices in the API server.
func published(t *testing.T, client *fake.Clientset) []resourceapi.Device {
	t.Helper()
	list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var all []resourceapi.Device
	for _, slice := range list.Items {
		if slice.Spec.Driver != names.Driver || *slice.Spec.NodeName != nodeName || slice.Spec.Pool.Name != nodeName {
			t.Errorf("slice %v", slice.Spec)
		}
		all = append(all, slice.Spec.Devices...)
	}
	return all
}

func allocated(drive string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "disk", UID: claimUID,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "vm", UID: "pod"}},
		},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "disk/large", Driver: names.Driver, Pool: nodeName, Device: devices.Name(drive),
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{names.Size: resource.MustParse("10Mi")},
			}},
		}}},
	}
}

func TestKubeletIsServedAndDrivesArePublished(t *testing.T) {
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		drives, err := s.Drives(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		drive := drives[0].Path
		d, client := newDriver(t, s, allocated(drive))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		await(t, "the drive", func() bool { return len(published(t, client)) == 1 })
		if device := published(t, client)[0]; device.Name != devices.Name(drive) || !*device.AllowMultipleAllocations {
			t.Errorf("device %v", device)
		}

		registered := filepath.Join(d.options.KubeletDir, "plugins_registry", names.Driver+"-reg.sock")
		if _, err := os.Stat(registered); err != nil {
			t.Error(err)
		}
		socket := filepath.Join(d.options.KubeletDir, "plugins", names.Driver, "dra.sock")
		connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer connection.Close()
		plugin := kubelet.NewDRAPluginClient(connection)
		asked := []*kubelet.Claim{{Namespace: "default", Name: "disk", Uid: claimUID}}
		answer, err := plugin.NodePrepareResources(ctx, &kubelet.NodePrepareResourcesRequest{Claims: asked})
		if err != nil || answer.Claims[claimUID].Error != "" {
			t.Fatalf("%v, %v", answer, err)
		}
		device := answer.Claims[claimUID].Devices[0]
		if device.DeviceName != devices.Name(drive) || device.PoolName != nodeName || !slices.Equal(device.RequestNames, []string{"disk"}) ||
			!slices.Equal(device.CdiDeviceIds, []string{cdi.Name(claimUID, 0)}) {
			t.Errorf("device %v", device)
		}
		if functions, err := s.Functions(ctx); err != nil || len(functions) != 1 {
			t.Errorf("functions %v, %v", functions, err)
		}
		// The published capacity includes the bytes of the claim, because the scheduler itself subtracts them.
		if size := published(t, client)[0].Capacity[names.Size].Value; size.Value() != testserver.Bytes {
			t.Errorf("size %s", &size)
		}
		gone, err := plugin.NodeUnprepareResources(ctx, &kubelet.NodeUnprepareResourcesRequest{Claims: asked})
		if err != nil || gone.Claims[claimUID].Error != "" {
			t.Fatalf("%v, %v", gone, err)
		}
		if functions, err := s.Functions(ctx); err != nil || len(functions) > 0 {
			t.Errorf("functions %v, %v", functions, err)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// dial connects to the plugin as kubelet does. The connection ends with the test.
func dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

// A restarted kubelet finds the plugin by the socket in its folder, and prepares the claims of running pods again.
func TestAKubeletThatIsRestartedPreparesTheSameAgain(t *testing.T) {
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		drives, err := s.Drives(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		d, client := newDriver(t, s, allocated(drives[0].Path))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		await(t, "the drive", func() bool { return len(published(t, client)) == 1 })

		asked := []*kubelet.Claim{{Namespace: "default", Name: "disk", Uid: claimUID}}
		var functions []string
		for range 3 {
			socket := filepath.Join(d.options.KubeletDir, "plugins_registry", names.Driver+"-reg.sock")
			registrar := registration.NewRegistrationClient(dial(t, socket))
			info, err := registrar.GetInfo(ctx, &registration.InfoRequest{})
			if err != nil || info.Name != names.Driver || info.Type != "DRAPlugin" {
				t.Fatalf("%v, %v", info, err)
			}
			plugin := kubelet.NewDRAPluginClient(dial(t, info.Endpoint))
			registered := &registration.RegistrationStatus{PluginRegistered: true}
			if _, err := registrar.NotifyRegistrationStatus(ctx, registered); err != nil {
				t.Fatal(err)
			}
			answer, err := plugin.NodePrepareResources(ctx, &kubelet.NodePrepareResourcesRequest{Claims: asked})
			if err != nil || answer.Claims[claimUID].Error != "" {
				t.Fatalf("%v, %v", answer, err)
			}
			if ids := answer.Claims[claimUID].Devices[0].CdiDeviceIds; !slices.Equal(ids, []string{cdi.Name(claimUID, 0)}) {
				t.Errorf("CDI devices %v", ids)
			}
			found, err := s.Functions(ctx)
			if err != nil || len(found) != 1 {
				t.Fatalf("functions %v, %v", found, err)
			}
			functions = append(functions, fmt.Sprint(found))
		}
		if len(slices.Compact(functions)) != 1 {
			t.Errorf("the function is another one: %v", functions)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func taints(d *Driver, t *testing.T) []string {
	t.Helper()
	var keys []string
	for _, slice := range d.Resources(t.Context(), false).Pools[nodeName].Slices {
		for _, device := range slice.Devices {
			for _, taint := range device.Taints {
				keys = append(keys, taint.Key)
			}
		}
	}
	return keys
}

func TestDrivesFollowTheServer(t *testing.T) {
	s := testserver.Fake(t)
	d, _ := newDriver(t, s)
	if keys := taints(d, t); len(keys) > 0 {
		t.Errorf("taints %v", keys)
	}
	testserver.Change(t, s, func(state *testserver.State) { state.Drives[0].Gone = true })
	if keys := taints(d, t); !slices.Equal(keys, []string{devices.TaintFailed}) {
		t.Errorf("taints %v", keys)
	}
	testserver.Change(t, s, func(state *testserver.State) { state.Drives[0].Gone, state.Garbage = false, true })
	if keys := taints(d, t); !slices.Equal(keys, []string{devices.TaintFailed, devices.TaintUnreachable}) {
		t.Errorf("taints %v", keys)
	}
	testserver.Change(t, s, func(state *testserver.State) {
		state.Drives[0].CriticalWarning, state.Garbage = server.WarningSpare, false
	})
	if keys := taints(d, t); !slices.Equal(keys, []string{devices.TaintWarning}) {
		t.Errorf("taints %v", keys)
	}
	testserver.Change(t, s, func(state *testserver.State) { state.Drives[0].CriticalWarning = 0 })
	if keys := taints(d, t); len(keys) > 0 {
		t.Errorf("taints %v", keys)
	}
}

func TestManyDrivesHaveSeveralSlices(t *testing.T) {
	s := testserver.Fake(t)
	d, _ := newDriver(t, s)
	testserver.Change(t, s, func(state *testserver.State) {
		for number := range 129 {
			state.Drives = append(state.Drives, server.Drive{Path: fmt.Sprintf("/srv/%d", number)})
		}
	})
	var lengths []int
	for _, slice := range d.Resources(t.Context(), false).Pools[nodeName].Slices {
		lengths = append(lengths, len(slice.Devices))
	}
	if !slices.Equal(lengths, []int{64, 64, 2}) {
		t.Errorf("slices of %v devices", lengths)
	}
}

func TestAClaimThatFailsDoesNotFailOthers(t *testing.T) {
	s := testserver.Fake(t)
	drives, err := s.Drives(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	good, bad := allocated(drives[0].Path), allocated("/srv/gone.img")
	bad.Name, bad.UID = "bad", "00000000-0000-4000-8000-000000000002"
	d, _ := newDriver(t, s, good, bad)
	results, err := plugin{d.options.Node}.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{bad, good})
	if err != nil || results[good.UID].Err != nil || len(results[good.UID].Devices) != 1 {
		t.Errorf("%v, %v", results, err)
	}
	if err := results[bad.UID].Err; err == nil || !strings.Contains(err.Error(), "default/bad") {
		t.Errorf("the error is %v", err)
	}
}
