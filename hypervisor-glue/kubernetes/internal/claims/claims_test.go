package claims

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"nvme-mpt.internal/kubernetes/internal/names"
)

func claim(name string, change func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{{Request: "disk", Driver: names.Driver}},
			}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "vm", UID: "pod"}},
		},
	}
	if change != nil {
		change(claim)
	}
	return claim
}

func heldClaim(claim *resourceapi.ResourceClaim) {
	claim.Status.ReservedFor = append(claim.Status.ReservedFor, holdOf(claim))
}

func TestClaimsAreHeldAsLongAsTheyKeepData(t *testing.T) {
	goes := func(claim *resourceapi.ResourceClaim) {
		claim.DeletionTimestamp, claim.Finalizers = new(metav1.Now()), []string{resourceapi.Finalizer}
	}
	for _, test := range []struct {
		name   string
		change func(*resourceapi.ResourceClaim)
		held   bool
		writes int
	}{
		{"allocated", nil, true, 1},
		{"held", heldClaim, true, 0},
		{"being deleted", func(c *resourceapi.ResourceClaim) { heldClaim(c); goes(c) }, false, 1},
		{"being deleted and not held", goes, false, 0},
		{"not allocated", func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil }, false, 0},
		{"of another driver", func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].Driver = "gpu.example.com"
		}, false, 0},
		{"of a pod", func(c *resourceapi.ResourceClaim) {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod"}}
		}, false, 0},
		{"with parameters that are refused", func(c *resourceapi.ResourceClaim) {
			heldClaim(c)
			c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: names.Driver, Parameters: runtime.RawExtension{Raw: []byte("{}")},
				}},
			}}
		}, false, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			client := fake.NewClientset(claim("disk", test.change))
			cluster := Cluster{Client: client}
			if err := cluster.HoldAll(t.Context()); err != nil {
				t.Fatal(err)
			}
			found, err := cluster.Get(t.Context(), "default", "disk")
			if err != nil {
				t.Fatal(err)
			}
			if IsHeld(found) != test.held || found.Status.ReservedFor[0].Name != "vm" {
				t.Errorf("consumers %v", found.Status.ReservedFor)
			}
			writes := 0
			for _, action := range client.Actions() {
				if action.GetVerb() == "update" {
					writes++
				}
			}
			if writes != test.writes {
				t.Errorf("%d writes", writes)
			}
		})
	}
}

func TestClaimsAreHeldAsTheyCome(t *testing.T) {
	client := fake.NewClientset(claim("first", nil))
	cluster := Cluster{Client: client}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- cluster.Watch(ctx, func(err error) { t.Error(err) }) }()
	await := func(name string) {
		t.Helper()
		for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if found, err := cluster.Get(ctx, "default", name); err == nil && found != nil && IsHeld(found) {
				return
			}
		}
		t.Fatalf("%s is not held", name)
	}
	await("first")
	if _, err := client.ResourceV1().ResourceClaims("default").Create(ctx, claim("second", nil), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	await("second")
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAClaimThatCannotBeHeldIsReportedAndOthersAreHeld(t *testing.T) {
	client := fake.NewClientset(claim("first", nil), claim("second", nil))
	client.PrependReactor("update", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		changed := action.(clienttesting.UpdateAction).GetObject().(*resourceapi.ResourceClaim)
		if changed.Name == "first" {
			return true, nil, errors.New("denied")
		}
		return false, nil, nil
	})
	cluster := Cluster{Client: client}
	err := cluster.HoldAll(t.Context())
	if err == nil || err.Error() != "claim default/first cannot be held: allow this account to update resourceclaims/status and resourceclaims/binding: denied" {
		t.Errorf("the error is %v", err)
	}
	if found, err := cluster.Get(t.Context(), "default", "second"); err != nil || !IsHeld(found) {
		t.Errorf("%v, %v", found, err)
	}
}

func TestAClaimThatIsGoneIsNone(t *testing.T) {
	cluster := Cluster{Client: fake.NewClientset()}
	if found, err := cluster.Get(t.Context(), "default", "disk"); found != nil || err != nil {
		t.Errorf("%v, %v", found, err)
	}
}

func TestAllPagesAreRead(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("list", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		options := action.(clienttesting.ListActionImpl).ListOptions
		page := 1
		if options.Continue != "" {
			_, _ = fmt.Sscan(options.Continue, &page)
		}
		list := &resourceapi.ResourceClaimList{Items: []resourceapi.ResourceClaim{*claim(fmt.Sprint("page-", page), nil)}}
		if page < 3 {
			list.Continue = fmt.Sprint(page + 1)
		}
		return true, list, nil
	})
	all, err := Cluster{Client: client}.List(t.Context())
	if err != nil || len(all) != 3 || all[2].Name != "page-3" {
		t.Errorf("%v, %v", all, err)
	}
}
