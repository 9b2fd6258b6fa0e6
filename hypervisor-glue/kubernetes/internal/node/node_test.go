package node_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"nvme-mpt.internal/kubernetes/internal/cdi"
	"nvme-mpt.internal/kubernetes/internal/devices"
	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/node"
	"nvme-mpt.internal/kubernetes/internal/parameters"
	"nvme-mpt.internal/kubernetes/internal/server"
	"nvme-mpt.internal/kubernetes/internal/testserver"
)

const nodeName = "worker-1"

func TestMain(m *testing.M) {
	if testserver.IsCommand(os.Args) {
		os.Exit(testserver.Main(os.Args))
	}
	if call := os.Getenv(victimVariable); call != "" {
		runVictim(call)
	}
	os.Exit(m.Run())
}

// cluster is an API server in memory, with these claims.
type cluster struct {
	Claims []*resourceapi.ResourceClaim
	Err    string
	Lists  int
}

func (c *cluster) Get(_ context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	if c.Err != "" {
		return nil, fmt.Errorf("%s", c.Err)
	}
	for _, claim := range c.Claims {
		if claim.Namespace == namespace && claim.Name == name {
			return claim, nil
		}
	}
	return nil, nil
}

func (c *cluster) List(context.Context) ([]resourceapi.ResourceClaim, error) {
	c.Lists++
	if c.Err != "" {
		return nil, fmt.Errorf("%s", c.Err)
	}
	var all []resourceapi.ResourceClaim
	for _, claim := range c.Claims {
		all = append(all, *claim)
	}
	return all, nil
}

func (c *cluster) remove(claim *resourceapi.ResourceClaim) {
	c.Claims = slices.DeleteFunc(c.Claims, func(other *resourceapi.ResourceClaim) bool { return other.UID == claim.UID })
}

// bench is a node plugin under test, with its drive server and its API server.
type bench struct {
	*node.Node
	cluster *cluster
	drive   string
}

func newBench(t *testing.T, s *server.Server) *bench {
	t.Helper()
	drives, err := s.Drives(t.Context())
	if err != nil || len(drives) != 1 {
		t.Fatalf("drives %v, %v", drives, err)
	}
	folder := t.TempDir()
	// The sockets are in the server's folder, because its path is short: a socket's path has at most 107 bytes.
	sockets := filepath.Join(s.StateDir, "c")
	if err := os.MkdirAll(sockets, 0o755); err != nil {
		t.Fatal(err)
	}
	cluster := &cluster{}
	return &bench{
		Node: &node.Node{
			WeightMax: 300,
			Name:      nodeName,
			Server:    s,
			Cluster:   cluster,
			Folder:    sockets,
			CDI:       cdi.Folder(filepath.Join(folder, "cdi")),
		},
		cluster: cluster,
		drive:   drives[0].Path,
	}
}

// uid returns the UID of the claim with this number.
func uid(number int) types.UID {
	return types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", number))
}

// claim adds an allocated claim to the cluster, with one request for each of the sizes in MiB.
func (b *bench) claim(number int, mebibytes ...int64) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default",
		Name:      fmt.Sprintf("disk-%d", number),
		UID:       uid(number),
	}}
	allocation := &resourceapi.AllocationResult{}
	for index, size := range mebibytes {
		allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: fmt.Sprintf("r%d", index),
			Driver:  names.Driver,
			Pool:    nodeName,
			Device:  devices.Name(b.drive),
			ShareID: new(types.UID(fmt.Sprintf("share-%d-%d", number, index))),
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{
				names.Size: *resource.NewQuantity(size*testserver.MiB, resource.BinarySI),
			},
		})
	}
	claim.Status.Allocation = allocation
	b.cluster.Claims = append(b.cluster.Claims, claim)
	return claim
}

// forPod changes the claim into one that was created for a pod, from a template.
func forPod(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	claim.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "vm", UID: "pod"}}
	claim.Annotations = map[string]string{"resource.kubernetes.io/pod-claim-name": "disk"}
	return claim
}

// held changes the claim into one that is held, so that it stays allocated.
func held(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
		{APIGroup: names.Driver, Resource: "leases", Name: claim.Name, UID: claim.UID},
	}
	return claim
}

// with adds parameters of the function to the claim.
func with(claim *resourceapi.ResourceClaim, function parameters.Function) *resourceapi.ResourceClaim {
	function.APIVersion, function.Kind = parameters.APIVersion, parameters.Kind
	raw, err := json.Marshal(function)
	if err != nil {
		panic(err)
	}
	claim.Status.Allocation.Devices.Config = append(claim.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver:     names.Driver,
			Parameters: runtime.RawExtension{Raw: raw},
		}},
	})
	return claim
}

func (b *bench) prepare(t *testing.T, claim *resourceapi.ResourceClaim) []node.Prepared {
	t.Helper()
	prepared, err := b.Prepare(t.Context(), claim)
	if err != nil {
		t.Fatal(err)
	}
	return prepared
}

func (b *bench) unprepare(t *testing.T, claim *resourceapi.ResourceClaim) {
	t.Helper()
	if err := b.Unprepare(t.Context(), claim.UID, claim.Namespace, claim.Name); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) collect(t *testing.T, all bool) node.Collected {
	t.Helper()
	collected, err := b.Collect(t.Context(), all)
	if err != nil {
		t.Fatal(err)
	}
	return collected
}

// functions returns the sorted ids of all functions of the server.
func (b *bench) functions(t *testing.T) []string {
	t.Helper()
	functions, err := b.Server.Functions(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, function := range functions {
		ids = append(ids, function.ID)
	}
	slices.Sort(ids)
	return ids
}

// capacity returns the free MiB of the drive, and the ids that have the other MiB, each with its number of MiB.
func (b *bench) capacity(t *testing.T) (free int64, ids []string) {
	t.Helper()
	capacities, err := b.Server.Capacities(t.Context())
	if err != nil || len(capacities) != 1 {
		t.Fatalf("capacities %v, %v", capacities, err)
	}
	for _, use := range capacities[0].Uses {
		ids = append(ids, fmt.Sprintf("%s %d", use.ID, use.Bytes/testserver.MiB))
	}
	slices.Sort(ids)
	return capacities[0].Free / testserver.MiB, ids
}

// files returns the names of CDI files and of folders of sockets.
func (b *bench) files(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, folder := range []string{string(b.CDI), b.Folder} {
		entries, err := os.ReadDir(folder)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, entry := range entries {
			all = append(all, entry.Name())
		}
	}
	return all
}

// checkNothing fails the test if the server has a function or data of a claim, or the node has a file of a claim.
func (b *bench) checkNothing(t *testing.T) {
	t.Helper()
	if functions := b.functions(t); len(functions) > 0 {
		t.Errorf("functions are left: %v", functions)
	}
	if free, ids := b.capacity(t); free != testserver.Bytes/testserver.MiB || len(ids) > 0 {
		t.Errorf("%d MiB are free, and %v have the others", free, ids)
	}
	if files := b.files(t); len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
}

// checkPrepared checks that a claim with two requests, of 10 and 5 MiB, has its functions, its data, its CDI file and its
// sockets.
func (b *bench) checkPrepared(t *testing.T, claim *resourceapi.ResourceClaim) {
	t.Helper()
	first, second := names.Lease(claim.UID, 0), names.Lease(claim.UID, 1)
	if functions := b.functions(t); !slices.Equal(functions, []string{first, second}) {
		t.Errorf("the functions are %v", functions)
	}
	if free, ids := b.capacity(t); free != 49 || !slices.Equal(ids, []string{first + " 10", second + " 5"}) {
		t.Errorf("%d MiB are free, and %v have the others", free, ids)
	}
	text, err := os.ReadFile(filepath.Join(string(b.CDI), "nvme-mpt.internal-function_"+string(claim.UID)+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var spec struct {
		CDIVersion, Kind string
		Devices          []struct {
			Name           string
			ContainerEdits struct{ Mounts []cdi.Mount }
		}
	}
	if err := json.Unmarshal(text, &spec); err != nil {
		t.Fatal(err)
	}
	if spec.CDIVersion != "0.6.0" || spec.Kind != "nvme-mpt.internal/function" || len(spec.Devices) != 2 {
		t.Errorf("the CDI file is %s", text)
	}
	for index, device := range spec.Devices {
		mount := device.ContainerEdits.Mounts[0]
		if device.Name != fmt.Sprintf("%s-%d", claim.UID, index) {
			t.Errorf("device %d is %s", index, device.Name)
		}
		if want := fmt.Sprintf("/run/nvme-mpt/%s/r%d", claim.Name, index); mount.ContainerPath != want {
			t.Errorf("the container's folder is %s, not %s", mount.ContainerPath, want)
		}
		if _, err := os.Stat(filepath.Join(mount.HostPath, node.SocketName)); err != nil {
			t.Errorf("no socket: %v", err)
		}
	}
}

func TestAClaimOfAPodLeavesNothing(t *testing.T) {
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		b := newBench(t, s)
		claim := forPod(b.claim(1, 10, 5))
		claim.Annotations = nil
		prepared := b.prepare(t, claim)
		if want := cdi.Name(claim.UID, 1); len(prepared) != 2 || prepared[1].CDIDevice != want {
			t.Errorf("prepared %v", prepared)
		}
		b.checkPrepared(t, claim)
		// A restarted kubelet prepares the claim again.
		b.prepare(t, claim)
		b.checkPrepared(t, claim)
		if collected := b.collect(t, true); len(collected.Released) > 0 {
			t.Errorf("released %v", collected.Released)
		}
		b.checkPrepared(t, claim)
		b.unprepare(t, claim)
		b.checkNothing(t)
		b.unprepare(t, claim)
		b.checkNothing(t)
	})
}

func TestAPodKnowsItsFolderByItsOwnNames(t *testing.T) {
	b := newBench(t, testserver.Fake(t))
	claim := forPod(b.claim(1, 1, 1, 1))
	results := claim.Status.Allocation.Devices.Results
	results[0].Request, results[1].Request, results[2].Request = "data", "data", "log/small"
	b.prepare(t, claim)
	text, err := os.ReadFile(filepath.Join(string(b.CDI), b.files(t)[0]))
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"disk/data", "disk/data.1", "disk/log"} {
		if !strings.Contains(string(text), `"/run/nvme-mpt/`+folder+`"`) {
			t.Errorf("no folder %s in %s", folder, text)
		}
	}
}

func TestDataOfAKeptClaimStaysUntilTheClaimIsDeleted(t *testing.T) {
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		b := newBench(t, s)
		claim := held(b.claim(1, 10, 5))
		b.prepare(t, claim)
		b.unprepare(t, claim)
		kept := []string{names.Lease(claim.UID, 0) + " 10", names.Lease(claim.UID, 1) + " 5"}
		if free, ids := b.capacity(t); free != 49 || !slices.Equal(ids, kept) {
			t.Errorf("%d MiB are free, and %v have the others", free, ids)
		}
		if functions, files := b.functions(t), b.files(t); len(functions)+len(files) > 0 {
			t.Errorf("functions %v and files %v are left", functions, files)
		}
		if collected := b.collect(t, true); len(collected.Released) > 0 || collected.Unallocated.Len() > 0 {
			t.Errorf("released %v", collected)
		}
		// The next pod of the claim gets the functions again.
		b.prepare(t, claim)
		b.checkPrepared(t, claim)
		b.unprepare(t, claim)
		// The claim loses its allocation. Its data stays, and is reported as unallocated.
		allocation := claim.Status.Allocation
		claim.Status.Allocation = nil
		if collected := b.collect(t, false); !collected.Unallocated.Has(names.Lease(claim.UID, 0)) || len(collected.Released) > 0 {
			t.Errorf("collected %v", collected)
		}
		claim.Status.Allocation = allocation
		b.cluster.remove(claim)
		if collected := b.collect(t, false); len(collected.Released) != 2 {
			t.Errorf("released %v", collected.Released)
		}
		b.checkNothing(t)
	})
}

func TestParametersDecideOverData(t *testing.T) {
	for _, test := range []struct {
		name string
		data parameters.Data
		pod  bool
		goes bool
		lost bool
		kept bool
	}{
		{name: "a claim of its own", kept: true},
		{name: "a claim of its own that lost its allocation", lost: true, kept: true},
		{name: "a claim of its own that says wipe", data: parameters.Wipe},
		{name: "a claim of its own that is being deleted", goes: true},
		{name: "a claim of a pod", pod: true},
		{name: "a claim of a pod that says keep", pod: true, data: parameters.Keep, kept: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, testserver.Fake(t))
			claim := held(b.claim(1, 3))
			if test.pod {
				forPod(claim)
			}
			with(claim, parameters.Function{Data: test.data})
			b.prepare(t, claim)
			if test.goes {
				claim.DeletionTimestamp = new(metav1.Now())
			}
			if test.lost {
				claim.Status.Allocation = nil
			}
			b.unprepare(t, claim)
			if _, ids := b.capacity(t); (len(ids) > 0) != test.kept {
				t.Errorf("%v have data", ids)
			}
		})
	}
}

func TestOptionsAreThoseOfGrantAndParameters(t *testing.T) {
	b := newBench(t, testserver.Fake(t))
	claim := forPod(b.claim(1, 3))
	claim.Status.Allocation.Devices.Results[0].ConsumedCapacity[names.Queues] = resource.MustParse("20")
	claim.Status.Allocation.Devices.Results[0].ConsumedCapacity[names.IOPS] = resource.MustParse("20k")
	claim.Status.Allocation.Devices.Results[0].ConsumedCapacity[names.Bandwidth] = resource.MustParse("100Mi")
	with(claim, parameters.Function{Owner: "107:108", Mode: "0660"})
	with(claim, parameters.Function{Weight: 300, Mode: "0600"})
	b.prepare(t, claim)
	state, err := testserver.Load(b.Server.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("socket=%s/%s/0/nvme.sock,path=%s,id=claim-%s,size=3145728,unit=1048576,queues=20,reserve=20,"+
		"iops=20000,bandwidth=104857600,weight=300,owner=107:108,mode=0600", b.Folder, claim.UID, b.drive, claim.UID)
	if got := state.Functions[0].Options; got != want {
		t.Errorf("options\n%s, not\n%s", got, want)
	}
}

func TestAClaimHasNoMoreWeightThanOperatorOrClassAllow(t *testing.T) {
	for _, test := range []struct {
		source  resourceapi.AllocationConfigSource
		weight  int64
		refused bool
	}{
		{resourceapi.AllocationConfigSourceClaim, 300, false},
		{resourceapi.AllocationConfigSourceClaim, 301, true},
		{resourceapi.AllocationConfigSourceClaim, 1000, true},
		{resourceapi.AllocationConfigSourceClass, 1000, false},
	} {
		b := newBench(t, testserver.Fake(t))
		claim := forPod(b.claim(1, 3))
		with(claim, parameters.Function{Weight: test.weight})
		claim.Status.Allocation.Devices.Config[0].Source = test.source
		_, err := b.Prepare(t.Context(), claim)
		if (err != nil) != test.refused {
			t.Errorf("%s, %d: %v", test.source, test.weight, err)
		}
		if err != nil && !strings.Contains(err.Error(), "-weight-max") {
			t.Error(err)
		}
	}
}

func TestWhatCannotBePreparedIsRefusedWithARemedy(t *testing.T) {
	for _, test := range []struct {
		name  string
		spoil func(b *bench, claim *resourceapi.ResourceClaim)
		says  string
	}{
		{"another node", func(_ *bench, claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0].Pool = "worker-2"
		}, "allocated for another node"},
		{"another device", func(_ *bench, claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0].Device = "gone"
		}, "with --drive"},
		{"a cluster without the feature", func(_ *bench, claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0].ConsumedCapacity = nil
		}, "DRAConsumableCapacity"},
		{"a kept claim that is not held", func(_ *bench, claim *resourceapi.ResourceClaim) {
			claim.OwnerReferences = nil
		}, "nvme-mpt-dra hold"},
		{"wrong parameters", func(_ *bench, claim *resourceapi.ResourceClaim) {
			with(claim, parameters.Function{Owner: "1,mode=0666"})
		}, "use numbers"},
		{"no room", func(_ *bench, claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0].ConsumedCapacity[names.Size] = resource.MustParse("65Mi")
		}, "no room"},
		{"a server that refuses", func(b *bench, _ *resourceapi.ResourceClaim) {
			state, _ := testserver.Load(b.Server.StateDir)
			state.Refuse = "not now"
			_ = state.Store(b.Server.StateDir)
		}, "not now"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, testserver.Fake(t))
			claim := forPod(b.claim(1, 3))
			test.spoil(b, claim)
			_, err := b.Prepare(t.Context(), claim)
			if err == nil || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), "default/disk-1") {
				t.Errorf("the error is %v", err)
			}
			if functions := b.functions(t); len(functions) > 0 {
				t.Errorf("functions %v", functions)
			}
			b.unprepare(t, claim)
			b.checkNothing(t)
		})
	}
}

func TestDataOnAnotherDriveIsNotLeftBehind(t *testing.T) {
	b := newBench(t, testserver.Fake(t))
	testserver.Change(t, b.Server, func(state *testserver.State) {
		state.Drives = append(state.Drives, server.Drive{Path: "0000:01:00.0"})
	})
	claim := held(b.claim(1, 3))
	b.prepare(t, claim)
	b.unprepare(t, claim)
	claim.Status.Allocation.Devices.Results[0].Device = devices.Name("0000:01:00.0")
	_, err := b.Prepare(t.Context(), claim)
	if err == nil || !strings.Contains(err.Error(), "its data is on drive "+b.drive) {
		t.Errorf("the error is %v", err)
	}
}

func TestAClaimGetsTheNamespaceWhoseCapacityWasPublished(t *testing.T) {
	b := newBench(t, testserver.Fake(t))
	const drive = "0000:01:00.0"
	testserver.Change(t, b.Server, func(state *testserver.State) {
		state.Drives = append(state.Drives, server.Drive{Path: drive})
		state.NSIDs = map[string]int64{drive: 2}
	})
	claim := forPod(b.claim(1, 3))
	claim.Status.Allocation.Devices.Results[0].Device = devices.Name(drive) + "-n2"
	b.prepare(t, claim)
	state, err := testserver.Load(b.Server.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	if options := state.Functions[0].Options; !strings.Contains(options, ",path="+drive+",namespace=2,") {
		t.Errorf("options %s", options)
	}
	// The server reports no capacity for the first namespace of this drive, so a claim for it is refused.
	claim = forPod(b.claim(2, 3))
	claim.Status.Allocation.Devices.Results[0].Device = devices.Name(drive)
	if _, err := b.Prepare(t.Context(), claim); err == nil || !strings.Contains(err.Error(), "no drive for device") {
		t.Errorf("the error is %v", err)
	}
}

func TestAFunctionThatFailedIsReported(t *testing.T) {
	b := newBench(t, testserver.Fake(t))
	claim := forPod(b.claim(1, 3))
	b.prepare(t, claim)
	testserver.Change(t, b.Server, func(state *testserver.State) {
		state.Functions[0].State = map[string]any{"failed": map[string]any{"reason": "its drive is gone"}}
	})
	_, err := b.Prepare(t.Context(), claim)
	if err == nil || !strings.Contains(err.Error(), "its drive is gone") {
		t.Errorf("the error is %v", err)
	}
	b.unprepare(t, claim)
	b.checkNothing(t)
}

func TestCapacityOfClaimsThatAreGoneIsTaken(t *testing.T) {
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		b := newBench(t, s)
		first := held(b.claim(1, 60))
		b.prepare(t, first)
		b.unprepare(t, first)
		second := forPod(b.claim(2, 10))
		if _, err := b.Prepare(t.Context(), second); err == nil {
			t.Error("the second claim has a function, though the first one has its data")
		}
		b.cluster.remove(first)
		b.prepare(t, second)
		if _, ids := b.capacity(t); !slices.Equal(ids, []string{names.Lease(second.UID, 0) + " 10"}) {
			t.Errorf("%v have the drive", ids)
		}
		b.unprepare(t, second)
		b.checkNothing(t)
	})
}

func TestWithoutAnAPIServerNoDataIsGivenUp(t *testing.T) {
	b := newBench(t, testserver.Fake(t))
	claim := forPod(b.claim(1, 10))
	b.prepare(t, claim)
	b.cluster.Err = "no API server"
	if err := b.Unprepare(t.Context(), claim.UID, claim.Namespace, claim.Name); err == nil {
		t.Error("no error")
	}
	if _, err := b.Collect(t.Context(), true); err == nil {
		t.Error("no error")
	}
	if _, ids := b.capacity(t); len(ids) != 1 {
		t.Errorf("%v have data", ids)
	}
	b.cluster.Err = ""
	b.unprepare(t, claim)
	b.checkNothing(t)
}

func TestAFunctionWhoseClaimIsGoneIsCollectedUnlessAVMMHasIt(t *testing.T) {
	b := newBench(t, testserver.Fake(t))
	claim := forPod(b.claim(1, 10))
	b.prepare(t, claim)
	b.cluster.remove(claim)
	b.collect(t, false)
	if b.cluster.Lists > 0 {
		t.Error("the API server was asked, though all leases have functions")
	}
	connect := func(connected bool) {
		testserver.Change(t, b.Server, func(state *testserver.State) { state.Functions[0].Connected = connected })
	}
	connect(true)
	if _, err := b.Collect(t.Context(), true); err == nil {
		t.Error("a function with a VMM was removed")
	}
	connect(false)
	b.collect(t, true)
	b.checkNothing(t)
}

func TestOtherLeasesAreLeftAlone(t *testing.T) {
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		b := newBench(t, s)
		options := server.Options{ID: "by-hand", Socket: filepath.Join(s.StateDir, "h.sock"), Drive: b.drive, Size: 4 * testserver.MiB, Unit: testserver.MiB}
		if err := s.Add(t.Context(), options); err != nil {
			t.Fatal(err)
		}
		others := []string{filepath.Join(b.Folder, "lost+found"), filepath.Join(string(b.CDI), "gpu.json")}
		for _, path := range others {
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		b.collect(t, true)
		for _, path := range others {
			if _, err := os.Stat(path); err != nil {
				t.Error(err)
			}
		}
		if functions := b.functions(t); !slices.Equal(functions, []string{"by-hand"}) {
			t.Errorf("functions %v", functions)
		}
	})
}

func TestFiftyClaimsComeAndGo(t *testing.T) {
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		b := newBench(t, s)
		const atOnce = 10
		var there []*resourceapi.ResourceClaim
		for number := range 50 {
			if len(there) == atOnce {
				// The claims are removed in another order than they were created.
				place := number % atOnce
				gone := there[place]
				there = slices.Delete(there, place, place+1)
				b.unprepare(t, gone)
				b.cluster.remove(gone)
			}
			claim := b.claim(number, 6)
			if number%3 == 0 {
				held(claim)
			} else {
				forPod(claim)
			}
			b.prepare(t, claim)
			there = append(there, claim)
		}
		if functions := b.functions(t); len(functions) != atOnce {
			t.Errorf("%d functions: %v", len(functions), functions)
		}
		for _, claim := range there {
			b.unprepare(t, claim)
			b.cluster.remove(claim)
		}
		b.collect(t, false)
		b.checkNothing(t)
	})
}

// victimVariable is the environment variable with the victim, as JSON, that a process of this test binary acts as.
const victimVariable = "NVME_MPT_DRA_VICTIM"

// victim describes a plugin process that makes one call and is killed after a step of it.
type victim struct {
	Server  server.Server
	Folder  string
	CDI     string
	Claim   *resourceapi.ResourceClaim
	Claims  []*resourceapi.ResourceClaim
	Call    string
	DieStep int
}

func runVictim(text string) {
	var v victim
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		panic(err)
	}
	steps := 0
	dying := &node.Node{
		Name: nodeName, Server: &v.Server, Cluster: &cluster{Claims: v.Claims}, Folder: v.Folder, CDI: cdi.Folder(v.CDI),
		After: func(step string) {
			if steps++; steps == v.DieStep {
				fmt.Println(step)
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		},
	}
	var err error
	switch v.Call {
	case "prepare":
		_, err = dying.Prepare(context.Background(), v.Claim)
	case "unprepare":
		err = dying.Unprepare(context.Background(), v.Claim.UID, v.Claim.Namespace, v.Claim.Name)
	case "collect":
		_, err = dying.Collect(context.Background(), true)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// kill makes a call in another process, and kills the process after a step. It returns the name of the step, or "" if the call
// ended before that step.
func (b *bench) kill(t *testing.T, call string, claim *resourceapi.ResourceClaim, step int) string {
	t.Helper()
	text, err := json.Marshal(victim{*b.Server, b.Folder, string(b.CDI), claim, b.cluster.Claims, call, step})
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(self)
	command.Env = append(os.Environ(), victimVariable+"="+string(text))
	output, err := command.Output()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return ""
	case !asExit(err, &exit) || exit.ExitCode() != -1:
		t.Fatalf("%s failed: %v, %s", call, err, output)
	}
	return strings.TrimSpace(string(output))
}

func asExit(err error, exit **exec.ExitError) bool {
	found, is := err.(*exec.ExitError)
	*exit = found
	return is
}

func TestAPluginThatIsKilledBetweenAnyTwoStepsGoesOn(t *testing.T) {
	const steps = 20
	calls := []struct {
		call string
		// before prepares what the call needs.
		before func(t *testing.T, b *bench, claim *resourceapi.ResourceClaim)
		dies   []string
	}{
		{"prepare", func(*testing.T, *bench, *resourceapi.ResourceClaim) {},
			[]string{"folder", "function", "folder", "function", "CDI file"}},
		{"unprepare", func(t *testing.T, b *bench, claim *resourceapi.ResourceClaim) { b.prepare(t, claim) },
			[]string{"function removed", "function removed", "data released", "data released", "CDI file removed", "folder removed"}},
		{"collect", func(t *testing.T, b *bench, claim *resourceapi.ResourceClaim) {
			b.prepare(t, claim)
			b.cluster.remove(claim)
		}, []string{"function removed", "data released", "function removed", "data released", "CDI file removed", "folder removed"}},
	}
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		b := newBench(t, s)
		number := 0
		for _, test := range calls {
			var died []string
			for step := 1; step <= steps; step++ {
				number++
				claim := forPod(b.claim(number, 10, 5))
				claim.Annotations = nil
				test.before(t, b, claim)
				name := b.kill(t, test.call, claim, step)
				if name != "" {
					died = append(died, name)
				}
				// A new plugin knows nothing of the killed one, and continues from the state of the server and the files.
				again := &bench{cluster: b.cluster, drive: b.drive, Node: &node.Node{
					Name: b.Name, Server: b.Server, Cluster: b.cluster, Folder: b.Folder, CDI: b.CDI,
				}}
				switch test.call {
				case "prepare":
					again.prepare(t, claim)
					again.checkPrepared(t, claim)
					again.unprepare(t, claim)
				case "unprepare":
					again.unprepare(t, claim)
				case "collect":
					again.collect(t, true)
				}
				again.checkNothing(t)
				b.cluster.remove(claim)
				if name == "" {
					break
				}
			}
			if !slices.Equal(died, test.dies) {
				t.Errorf("%s died after %v", test.call, died)
			}
		}
		// The plugin is killed in Prepare, and the claim is deleted before the next plugin starts.
		for step := 1; step <= 5; step++ {
			number++
			claim := forPod(b.claim(number, 10, 5))
			if b.kill(t, "prepare", claim, step) == "" {
				t.Fatal("it was not killed")
			}
			b.cluster.remove(claim)
			b.collect(t, true)
			b.checkNothing(t)
		}
	})
}

func TestAClaimIsPreparedOnceItIsHeld(t *testing.T) {
	b := newBench(t, testserver.Fake(t))
	b.HoldTimeout = 3 * time.Minute
	claim := b.claim(1, 3)
	looks := 0
	b.Cluster = &holding{cluster: b.cluster, look: func() {
		if looks++; looks == 2 {
			held(b.cluster.Claims[0])
		}
	}}
	b.prepare(t, claim.DeepCopy())
	if looks != 2 {
		t.Errorf("%d looks", looks)
	}
}

// holding is an API server in memory that calls look before each read of a claim.
type holding struct {
	*cluster
	look func()
}

func (h *holding) Get(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	h.look()
	return h.cluster.Get(ctx, namespace, name)
}
