package devices

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"sigs.k8s.io/yaml"

	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/server"
)

const (
	nodeName  = "worker-1"
	manifests = "../../manifests"
)

// read returns the first object of a kind in a file of the manifests.
func read[T any](t *testing.T, file, kind string) *T {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(manifests, file))
	if err != nil {
		t.Fatal(err)
	}
	for part := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var head metav1.TypeMeta
		if err := yaml.Unmarshal(part, &head); err != nil {
			t.Fatal(err)
		}
		if head.Kind != kind {
			continue
		}
		found := new(T)
		if err := yaml.UnmarshalStrict(part, found); err != nil {
			t.Fatalf("%s of %s: %v", kind, file, err)
		}
		return found
	}
	t.Fatalf("no %s in %s", kind, file)
	return nil
}

// classes is a list of device classes with one entry, the class of the manifests.
type classes struct{ class *resourceapi.DeviceClass }

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	return []*resourceapi.DeviceClass{c.class}, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if name != c.class.Name {
		return nil, fmt.Errorf("there is no class %s", name)
	}
	return c.class, nil
}

// scheduler is the allocator of Kubernetes' own scheduler, with the claims that it allocated.
type scheduler struct {
	t         *testing.T
	devices   []resourceapi.Device
	class     *resourceapi.DeviceClass
	allocated map[types.UID]*resourceapi.ResourceClaim
}

func newScheduler(t *testing.T, devices []resourceapi.Device) *scheduler {
	return &scheduler{
		t:         t,
		devices:   devices,
		class:     read[resourceapi.DeviceClass](t, "nvme-mpt.yaml", "DeviceClass"),
		allocated: make(map[types.UID]*resourceapi.ResourceClaim),
	}
}

// state returns the scheduler's record of allocated claims: the devices and the capacity that they consume.
func (s *scheduler) state() structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range s.allocated {
		for _, result := range claim.Status.Allocation.Devices.Results {
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
		}
	}
	return state
}

// allocate tries to allocate a claim on the node.
func (s *scheduler) allocate(claim *resourceapi.ResourceClaim) bool {
	s.t.Helper()
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "slice"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   names.Driver,
			Pool:     resourceapi.ResourcePool{Name: nodeName, ResourceSliceCount: 1},
			NodeName: new(nodeName),
			Devices:  s.devices,
		},
	}
	// The scheduler of Kubernetes 1.36 has these features, and that of 1.34 has them if its feature gates are enabled.
	features := structured.Features{ConsumableCapacity: true, DeviceTaints: true, PrioritizedList: true}
	allocator, err := structured.NewAllocator(s.t.Context(), features, s.state(), classes{s.class}, []*resourceapi.ResourceSlice{slice}, cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}))
	if err != nil {
		s.t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	results, err := allocator.Allocate(s.t.Context(), node, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		s.t.Fatal(err)
	}
	if len(results) == 0 {
		return false
	}
	claim.Status.Allocation = &results[0]
	s.allocated[claim.UID] = claim
	return true
}

func (s *scheduler) free(claim *resourceapi.ResourceClaim) {
	delete(s.allocated, claim.UID)
}

// claim returns a claim that requests these capacities.
func claim(number int, capacity map[resourceapi.QualifiedName]string) *resourceapi.ResourceClaim {
	requests := make(map[resourceapi.QualifiedName]resource.Quantity, len(capacity))
	for name, value := range capacity {
		requests[name] = resource.MustParse(value)
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("claim-", number), UID: types.UID(fmt.Sprint("uid-", number))},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "disk",
			Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: "nvme-mpt",
				AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
				Count:           1,
				Capacity:        &resourceapi.CapacityRequirements{Requests: requests},
			},
		}}}},
	}
}

// drives returns the devices of one drive.
func drives(number int) []resourceapi.Device {
	found := facts()
	found.Drives = found.Drives[number : number+1]
	return Of(found, rates)
}

func consumed(claim *resourceapi.ResourceClaim, name resourceapi.QualifiedName) string {
	quantity := claim.Status.Allocation.Devices.Results[0].ConsumedCapacity[name]
	return quantity.String()
}

func TestTheThirdClaimFitsOnceTheSecondIsGone(t *testing.T) {
	for _, test := range []struct {
		name  string
		drive int
		asks  map[resourceapi.QualifiedName]string
	}{
		{"size", 1, map[resourceapi.QualifiedName]string{names.Size: "4500Mi"}},
		{"queues", 0, map[resourceapi.QualifiedName]string{names.Size: "1Gi", names.Queues: "15"}},
		{"iops", 0, map[resourceapi.QualifiedName]string{names.Size: "1Gi", names.IOPS: "400k"}},
		{"bandwidth", 0, map[resourceapi.QualifiedName]string{names.Size: "1Gi", names.Bandwidth: "3Gi"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newScheduler(t, drives(test.drive))
			first, second, third := claim(1, test.asks), claim(2, test.asks), claim(3, test.asks)
			if !s.allocate(first) || !s.allocate(second) {
				t.Fatal("two claims do not fit")
			}
			if s.allocate(third) {
				t.Fatal("three claims fit")
			}
			if size := consumed(first, names.Size); test.name == "size" && size != "5Gi" {
				t.Errorf("4500Mi were rounded to %s", size)
			}
			s.free(second)
			if !s.allocate(third) {
				t.Error("the third claim does not fit, though the second is gone")
			}
			if first.Status.Allocation.Devices.Results[0].ShareID == nil {
				t.Error("the claim does not share")
			}
		})
	}
}

func TestAClaimThatAsksForNothingGetsTheDefaults(t *testing.T) {
	s := newScheduler(t, drives(0))
	one := claim(1, nil)
	if !s.allocate(one) {
		t.Fatal("it does not fit")
	}
	got := []string{consumed(one, names.Size), consumed(one, names.Queues), consumed(one, names.IOPS), consumed(one, names.Bandwidth)}
	if want := []string{"1Gi", "0", "0", "512Mi"}; !slices.Equal(got, want) {
		t.Errorf("it got %v", got)
	}
}

func TestAFileHasNoQueuePairsToReserve(t *testing.T) {
	s := newScheduler(t, drives(1))
	if s.allocate(claim(1, map[resourceapi.QualifiedName]string{names.Queues: "1"})) {
		t.Error("a claim for queue pairs got a file")
	}
}

func TestNoClaimGetsADriveThatFailed(t *testing.T) {
	found := facts()
	found.Drives = found.Drives[1:2]
	found.Drives[0].Gone = true
	failed := Of(found, rates)
	s := newScheduler(t, failed)
	if s.allocate(claim(1, nil)) {
		t.Error("a claim got a drive that failed")
	}
	// This stands for a device class of the operator without selectors, and so without a check of the drive's health.
	s.class.Spec.Selectors = nil
	if s.allocate(claim(1, nil)) {
		t.Error("a claim got a drive with a taint")
	}
	s.devices = Unreachable(drives(1))
	if s.allocate(claim(1, nil)) {
		t.Error("a claim got a drive whose server does not answer")
	}
	s.devices = drives(1)
	if !s.allocate(claim(1, nil)) {
		t.Error("no claim gets a drive that came back")
	}
}

func TestNoClaimGetsADriveThatWarnsUnlessItToleratesTheReason(t *testing.T) {
	found := facts()
	found.Drives = found.Drives[1:2]
	found.Drives[0].CriticalWarning = server.WarningTemperature
	s := newScheduler(t, Of(found, rates))
	if s.allocate(claim(1, nil)) {
		t.Error("a claim got a drive that warns")
	}
	// This stands for a device class of the operator without selectors, and so without a check of the drive's health.
	s.class.Spec.Selectors = nil
	if s.allocate(claim(1, nil)) {
		t.Error("a claim got a drive with a taint")
	}
	tolerates := func(reason string) *resourceapi.ResourceClaim {
		claim := claim(1, nil)
		claim.Spec.Devices.Requests[0].Exactly.Tolerations = []resourceapi.DeviceToleration{{
			Key: TaintWarning, Operator: resourceapi.DeviceTolerationOpEqual, Value: reason,
		}}
		return claim
	}
	if s.allocate(tolerates("read-only")) {
		t.Error("a claim got a drive with another warning than the one that it tolerates")
	}
	if !s.allocate(tolerates("temperature")) {
		t.Error("a claim does not get a drive whose warning it tolerates")
	}
}

func TestAllocatedClaimsStayFittingWhateverTheServerReportsNow(t *testing.T) {
	// Two claims fill the drive. The server has created a function for one of them and not yet for the other.
	s := newScheduler(t, drives(1))
	first, second := claim(1, map[resourceapi.QualifiedName]string{names.Size: "6Gi"}), claim(2, map[resourceapi.QualifiedName]string{names.Size: "4Gi"})
	first.UID = "00000000-0000-4000-8000-000000000001"
	if !s.allocate(first) || !s.allocate(second) {
		t.Fatal("they do not fit")
	}
	found := facts()
	found.Drives = found.Drives[1:2]
	found.Capacities[1].Free = 4 * gib
	found.Capacities[1].Uses = []server.Use{{ID: names.Lease(first.UID, 0), Bytes: 6 * gib, Leased: true}}
	s.devices = Of(found, rates)
	if s.allocate(claim(3, nil)) {
		t.Error("a third claim fits a full drive")
	}
	s.free(second)
	if !s.allocate(claim(3, map[resourceapi.QualifiedName]string{names.Size: "4Gi"})) {
		t.Error("the place of the second claim is lost")
	}
}

func TestExamplesAreAllocated(t *testing.T) {
	template := func(file string) resourceapi.ResourceClaimSpec {
		return read[resourceapi.ResourceClaimTemplate](t, file, "ResourceClaimTemplate").Spec.Spec
	}
	specs := map[string]resourceapi.ResourceClaimSpec{
		"pod":      template("examples/pod.yaml"),
		"selected": template("examples/selected-claim.yaml"),
		"kept":     read[resourceapi.ResourceClaim](t, "examples/kept-claim.yaml", "ResourceClaim").Spec,
	}
	s := newScheduler(t, Of(facts(), rates))
	number := 0
	for name, spec := range specs {
		number++
		one := claim(number, nil)
		one.Spec = spec
		for i := range one.Spec.Devices.Requests {
			// The API server sets these defaults.
			request := one.Spec.Devices.Requests[i].Exactly
			request.AllocationMode, request.Count = resourceapi.DeviceAllocationModeExactCount, 1
		}
		if !s.allocate(one) {
			t.Errorf("the example %q is not allocated", name)
			continue
		}
		if device := one.Status.Allocation.Devices.Results[0].Device; device != "pci-0000-01-00-0" {
			t.Errorf("the example %q is on %s", name, device)
		}
	}
}
