// Package claims reads the claims of a cluster, and holds claims that keep their data, so that they stay allocated.
package claims

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/parameters"
)

// page is the number of claims that one request reads.
const page = 500

// Cluster reads and updates claims through the cluster's API server.
type Cluster struct {
	Client kubernetes.Interface
}

// Get returns a claim, or nil if there is none.
func (c Cluster) Get(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	claim, err := c.Client.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("claim %s/%s cannot be read from the API server: %w", namespace, name, err)
	}
	return claim, nil
}

// List returns all claims that the API server has at present.
func (c Cluster) List(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	var all []resourceapi.ResourceClaim
	options := metav1.ListOptions{Limit: page}
	for {
		list, err := c.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, options)
		if err != nil {
			return nil, fmt.Errorf("the claims cannot be read from the API server: %w", err)
		}
		all = append(all, list.Items...)
		if list.Continue == "" {
			return all, nil
		}
		options.Continue = list.Continue
	}
}

// Results returns the allocation results of this driver, in the claim's order.
func Results(claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if claim.Status.Allocation == nil {
		return nil
	}
	var own []resourceapi.DeviceRequestAllocationResult
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == names.Driver {
			own = append(own, result)
		}
	}
	return own
}

// IsKept reports whether data of any request of a claim stays after the claim's pods have ended.
func IsKept(claim *resourceapi.ResourceClaim) (bool, error) {
	for _, result := range Results(claim) {
		function, err := parameters.Of(claim, result.Request)
		if err != nil {
			return false, err
		}
		if function.DataPolicy(claim) == parameters.Keep {
			return true, nil
		}
	}
	return false, nil
}

// IsHeld reports whether the claim is held, so that it stays allocated without a pod.
func IsHeld(claim *resourceapi.ResourceClaim) bool {
	for _, consumer := range claim.Status.ReservedFor {
		if isHold(consumer) {
			return true
		}
	}
	return false
}
