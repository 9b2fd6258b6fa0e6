package parameters

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"nvme-mpt.internal/kubernetes/internal/names"
)

func opaque(driver, text string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(text)},
	}}
}

func text(fields string) string {
	return `{"apiVersion":"nvme-mpt.internal/v1alpha1","kind":"FunctionParameters"` + fields + `}`
}

func TestParametersOfTheClaimGoBeforeThoseOfTheClass(t *testing.T) {
	claim := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Config: []resourceapi.DeviceAllocationConfiguration{
			{Source: resourceapi.AllocationConfigSourceClass, DeviceConfiguration: opaque(names.Driver, text(`,"data":"keep","weight":7`))},
			{Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: opaque(names.Driver, text(`,"weight":9,"owner":":36"`))},
			{Requests: []string{"other"}, DeviceConfiguration: opaque(names.Driver, text(`,"queues":3`))},
			{Requests: []string{"disk"}, DeviceConfiguration: opaque(names.Driver, text(`,"mode":"0660"`))},
			{DeviceConfiguration: opaque("gpu.example.com", `{"sharing":true}`)},
		}},
	}}}
	for _, request := range []string{"disk", "disk/large"} {
		function, err := Of(claim, request)
		if err != nil {
			t.Fatal(err)
		}
		want := Function{APIVersion: APIVersion, Kind: Kind, Data: Keep, Owner: ":36", Mode: "0660", Weight: 9, ClassWeight: 7}
		if function != want {
			t.Errorf("parameters %v", function)
		}
	}
}

func TestAClaimThatIsNotAllocatedHasItsOwn(t *testing.T) {
	claim := &resourceapi.ResourceClaim{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: opaque(names.Driver, text(`,"data":"wipe"`))}},
	}}}
	if function, err := Of(claim, "disk"); err != nil || function.Data != Wipe {
		t.Errorf("%v, %v", function, err)
	}
}

func TestWrongParametersAreRefused(t *testing.T) {
	for _, test := range []struct{ text, says string }{
		{`{"kind":"FunctionParameters"}`, "use kind FunctionParameters of nvme-mpt.internal/v1alpha1"},
		{text(`,"dta":"keep"`), "dta"},
		{text(`,"data":"drop"`), "use keep or wipe"},
		{text(`,"owner":"qemu"`), "use numbers"},
		{text(`,"owner":"0,mode=0777"`), "use numbers"},
		{text(`,"owner":"1:2:3"`), "use numbers"},
		{text(`,"mode":"rw"`), "octal"},
		{text(`,"mode":"04755"`), "octal"},
		{text(`,"queues":65`), "1 to 64"},
		{text(`,"weight":-1`), "1 to 1000"},
		{`[]`, "FunctionParameters"},
	} {
		var function Function
		if err := merge(&function, []byte(test.text)); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v", test.text, err)
		}
	}
}

func TestDataOfAPodsClaimGoesWithThePod(t *testing.T) {
	pod := metav1.OwnerReference{APIVersion: "v1", Kind: "Pod"}
	other := metav1.OwnerReference{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachine"}
	for _, test := range []struct {
		owners []metav1.OwnerReference
		data   Data
		policy Data
	}{
		{nil, "", Keep},
		{[]metav1.OwnerReference{other}, "", Keep},
		{[]metav1.OwnerReference{other, pod}, "", Wipe},
		{[]metav1.OwnerReference{pod}, Keep, Keep},
		{nil, Wipe, Wipe},
	} {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{OwnerReferences: test.owners}}
		function := Function{Data: test.data}
		if policy := function.DataPolicy(claim); policy != test.policy {
			t.Errorf("%v: %s", test, policy)
		}
	}
}
