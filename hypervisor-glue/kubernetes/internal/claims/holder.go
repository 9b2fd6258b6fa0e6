package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nvme-mpt.internal/kubernetes/internal/names"
)

// holdResource names the consumer that keeps a claim allocated. No such object exists: Kubernetes' claim controller
// ignores consumers that it does not know (Kubernetes 1.36, pkg/controller/resourceclaim/controller.go).
const holdResource = "leases"

func isHold(consumer resourceapi.ResourceClaimConsumerReference) bool {
	return consumer.APIGroup == names.Driver && consumer.Resource == holdResource
}

func holdOf(claim *resourceapi.ResourceClaim) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{
		APIGroup: names.Driver,
		Resource: holdResource,
		Name:     claim.Name,
		// The UID must differ from those of the claim's other consumers, which are pods. No pod has the UID of a claim.
		UID: claim.UID,
	}
}

// Hold makes a claim stay allocated if it keeps its data, and releases a claim that is being deleted. A claim without
// a consumer would be deallocated, and its next pod might be placed on another node.
//
// The update is conditional on the version of the claim that was read. If it fails, the next call repeats it.
func (c Cluster) Hold(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	kept, err := IsKept(claim)
	if err != nil {
		// The parameters are invalid. A node plugin refuses them and creates no function, so the claim has no data to keep.
		kept = false
	}
	wanted := kept && claim.DeletionTimestamp == nil
	if wanted == IsHeld(claim) {
		return nil
	}
	changed := claim.DeepCopy()
	if wanted {
		changed.Status.ReservedFor = append(changed.Status.ReservedFor, holdOf(claim))
	} else {
		changed.Status.ReservedFor = slices.DeleteFunc(changed.Status.ReservedFor, isHold)
	}
	_, err = c.Client.ResourceV1().ResourceClaims(claim.Namespace).UpdateStatus(ctx, changed, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		// The claim was changed or deleted since it was read. The watch reports a newer version, so it is handled then.
		return nil
	}
	if err != nil {
		return fmt.Errorf("claim %s/%s cannot be held: allow this account to update resourceclaims/status and resourceclaims/binding: %w",
			claim.Namespace, claim.Name, err)
	}
	return nil
}

// HoldAll holds or releases all claims as needed. It returns all errors.
func (c Cluster) HoldAll(ctx context.Context) error {
	all, err := c.List(ctx)
	if err != nil {
		return err
	}
	var failed []error
	for i := range all {
		failed = append(failed, c.Hold(ctx, &all[i]))
	}
	return errors.Join(failed...)
}

// Watch holds claims that are created or changed, until the context ends or the API server closes the watch.
func (c Cluster) Watch(ctx context.Context, report func(error)) error {
	list, err := c.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return fmt.Errorf("the claims cannot be read from the API server: %w", err)
	}
	watch, err := c.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		return fmt.Errorf("the claims cannot be watched: %w", err)
	}
	defer watch.Stop()
	// This handles the claims that exist already. The watch reports changes that happen from now on.
	if err := c.HoldAll(ctx); err != nil {
		report(err)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, open := <-watch.ResultChan():
			if !open {
				return nil
			}
			claim, isClaim := event.Object.(*resourceapi.ResourceClaim)
			if !isClaim {
				// The API server has sent an error, for example because the watched version is too old. The caller starts
				// another watch.
				return nil
			}
			if err := c.Hold(ctx, claim); err != nil {
				report(err)
			}
		}
	}
}
