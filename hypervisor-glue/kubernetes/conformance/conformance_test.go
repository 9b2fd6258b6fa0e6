// Package conformance_test holds this driver against parts of Kubernetes itself: the API server's validation, and the
// controller that deallocates claims. It is a module of its own, as the driver needs none of them.
package conformance_test

import (
	"context"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2"
	api "k8s.io/kubernetes/pkg/apis/resource"
	apiv1 "k8s.io/kubernetes/pkg/apis/resource/v1"
	"k8s.io/kubernetes/pkg/apis/resource/validation"
	"k8s.io/kubernetes/pkg/controller/resourceclaim"

	"nvme-mpt.internal/kubernetes/internal/claims"
	"nvme-mpt.internal/kubernetes/internal/devices"
	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/server"
)

const gib = 1 << 30

// timeout is the timeout for the controller. It exceeds any delay of a busy machine.
const timeout = 3 * time.Minute

func published(free int64, gone bool, warning server.Warnings) []resourceapi.Device {
	return devices.Of(devices.Facts{
		Drives:     []server.Drive{{Path: "0000:01:00.0", Model: "Fast", Gone: gone, CriticalWarning: warning, QueuePairs: &server.QueuePairs{Total: 32}}, {Path: "/srv/a.img"}},
		Capacities: []server.DriveCapacity{{Drive: "0000:01:00.0", LBABytes: 512, Unit: gib, Free: free}, {Drive: "/srv/a.img", LBABytes: 512, Unit: gib, Free: free}},
		HostDrives: []server.HostDrive{{Address: "0000:01:00.0", NUMANode: new(int64)}},
		IsCounted:  func(string) bool { return true },
	}, devices.Rates{IOPS: devices.Rate{Total: 1_000_000}, Bandwidth: devices.Rate{Total: 6 * gib, Default: gib}})
}

func TestSlicesAreValidHoweverLittleIsLeft(t *testing.T) {
	for _, free := range []int64{0, gib, 2 * gib, 300 * gib} {
		all := [][]resourceapi.Device{
			published(free, false, 0), published(free, true, 0), published(free, false, server.WarningReadOnly), published(free, false, 0xff),
			devices.Unreachable(published(free, true, 0)), devices.Unreachable(published(free, false, 0xff)),
		}
		for _, found := range all {
			slice := &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: "slice"},
				Spec: resourceapi.ResourceSliceSpec{
					Driver:   names.Driver,
					Pool:     resourceapi.ResourcePool{Name: "worker-1", ResourceSliceCount: 1},
					NodeName: new("worker-1"),
					Devices:  found,
				},
			}
			// The API server also sets the defaults before it validates an object.
			apiv1.SetObjectDefaults_ResourceSlice(slice)
			var internal api.ResourceSlice
			if err := apiv1.Convert_v1_ResourceSlice_To_resource_ResourceSlice(slice, &internal, nil); err != nil {
				t.Fatal(err)
			}
			if errs := validation.ValidateResourceSlice(&internal); len(errs) > 0 {
				t.Errorf("%d bytes: %v", free, errs)
			}
		}
	}
}

// allocated returns an allocated claim. The pod that it is reserved for does not exist any more.
func allocated() *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "disk", UID: "uid", ResourceVersion: "1", Finalizers: []string{resourceapi.Finalizer}},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name:    "disk",
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nvme-mpt", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "disk", Driver: names.Driver, Pool: "worker-1", Device: "pci-0000-01-00-0",
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{names.Size: resource.MustParse("1Gi")},
			}}}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "vm", UID: "pod"}},
		},
	}
}

func TestAHoldIsAValidConsumer(t *testing.T) {
	before := allocated()
	cluster := claims.Cluster{Client: fake.NewClientset(before.DeepCopy())}
	if err := cluster.HoldAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	held, err := cluster.Get(t.Context(), "default", "disk")
	if err != nil || !claims.IsHeld(held) {
		t.Fatalf("%v, %v", held, err)
	}
	held.ResourceVersion = "1"
	var internal, internalBefore api.ResourceClaim
	if err := apiv1.Convert_v1_ResourceClaim_To_resource_ResourceClaim(held, &internal, nil); err != nil {
		t.Fatal(err)
	}
	if err := apiv1.Convert_v1_ResourceClaim_To_resource_ResourceClaim(before, &internalBefore, nil); err != nil {
		t.Fatal(err)
	}
	if errs := validation.ValidateResourceClaimStatusUpdate(&internal, &internalBefore); len(errs) > 0 {
		t.Error(errs)
	}
}

// TestAClaimStaysAllocatedAsLongAsItIsHeld runs Kubernetes' own claim controller on a claim that is held, and on one that is
// not.
func TestAClaimStaysAllocatedAsLongAsItIsHeld(t *testing.T) {
	for _, isHeld := range []bool{false, true} {
		client := fake.NewClientset(allocated())
		cluster := claims.Cluster{Client: client}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		if isHeld {
			if err := cluster.HoldAll(ctx); err != nil {
				t.Fatal(err)
			}
		}
		factory := informers.NewSharedInformerFactory(client, 0)
		controller, err := resourceclaim.NewController(klog.FromContext(ctx), resourceclaim.Features{}, client,
			factory.Core().V1().Pods(), factory.Scheduling().V1alpha2().PodGroups(),
			factory.Resource().V1().ResourceClaims(), factory.Resource().V1().ResourceClaimTemplates())
		if err != nil {
			t.Fatal(err)
		}
		factory.Start(ctx.Done())
		factory.WaitForCacheSync(ctx.Done())
		go controller.Run(ctx, 1)
		// awaitClaim waits until the controller has changed the claim so that the condition is true, and returns the claim.
		awaitClaim := func(what string, is func(*resourceapi.ResourceClaim) bool) *resourceapi.ResourceClaim {
			t.Helper()
			for deadline := time.Now().Add(timeout); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
				claim, err := cluster.Get(ctx, "default", "disk")
				if err != nil {
					t.Fatal(err)
				}
				if is(claim) {
					return claim
				}
			}
			t.Fatalf("waited in vain for a claim %s", what)
			return nil
		}
		claim := awaitClaim("without its pod", func(claim *resourceapi.ResourceClaim) bool {
			for _, consumer := range claim.Status.ReservedFor {
				if consumer.Resource == "pods" {
					return false
				}
			}
			return true
		})
		// The controller removes the pod and the allocation by one update, so the allocation can be checked now.
		if (claim.Status.Allocation != nil) != isHeld || claims.IsHeld(claim) != isHeld {
			t.Errorf("held: %v, allocation %v, consumers %v", isHeld, claim.Status.Allocation, claim.Status.ReservedFor)
		}
		if !isHeld {
			continue
		}
		// The user deletes the claim, and `nvme-mpt-dra hold` releases it.
		claim.DeletionTimestamp = new(metav1.Now())
		if _, err := client.ResourceV1().ResourceClaims("default").Update(ctx, claim, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := cluster.HoldAll(ctx); err != nil {
			t.Fatal(err)
		}
		awaitClaim("that may go", func(claim *resourceapi.ResourceClaim) bool {
			return claim == nil || (claim.Status.Allocation == nil && len(claim.Finalizers) == 0)
		})
	}
}
