// Package parameters reads the opaque device parameters of claims and classes.
package parameters

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"nvme-mpt.internal/kubernetes/internal/names"
)

const (
	// APIVersion is the version of the parameters.
	APIVersion = names.Driver + "/v1alpha1"
	// Kind is the kind of the parameters.
	Kind = "FunctionParameters"
)

// Data is the policy for a claim's data after its last pod has ended.
type Data string

const (
	// Keep retains the data for the claim's next pod. The data is wiped after the claim is deleted.
	Keep Data = "keep"
	// Wipe releases the data, which is erased before another claim gets its space.
	Wipe Data = "wipe"
)

// Function has the parameters of one function.
type Function struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// Data is the policy for the claim's data. By default, data is wiped if the claim was created for a pod, and kept
	// otherwise.
	Data Data `json:"data,omitempty"`
	// Owner is the owner of the socket: USER, USER:GROUP or :GROUP, in numbers.
	Owner string `json:"owner,omitempty"`
	// Mode is the socket's mode in octal digits.
	Mode string `json:"mode,omitempty"`
	// Queues is the maximum number of I/O queue pairs for the guest.
	Queues int64 `json:"queues,omitempty"`
	// Weight is the guest's share relative to other busy guests of a physical drive.
	Weight int64 `json:"weight,omitempty"`
	// ClassWeight is the weight in the class, which the operator has set.
	ClassWeight int64 `json:"-"`
}

var (
	ownerForm = regexp.MustCompile(`^([0-9]{1,10})?(:[0-9]{1,10})?$`)
	modeForm  = regexp.MustCompile(`^0?[0-7]{3}$`)
)

// Of returns the parameters of a claim's request. Those of the claim override those of the class.
func Of(claim *resourceapi.ResourceClaim, request string) (Function, error) {
	var merged Function
	for _, config := range configurations(claim) {
		opaque := config.Opaque
		if opaque == nil || opaque.Driver != names.Driver {
			continue
		}
		if len(config.Requests) > 0 && !concerns(config.Requests, request) {
			continue
		}
		if err := merge(&merged, opaque.Parameters.Raw); err != nil {
			return merged, fmt.Errorf("parameters of claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
		if config.IsOfClass {
			merged.ClassWeight = merged.Weight
		}
	}
	return merged, nil
}

type configuration struct {
	Requests  []string
	Opaque    *resourceapi.OpaqueDeviceConfiguration
	IsOfClass bool
}

// configurations returns the parameters in the claim's allocation, those of device classes first. Without an allocation, it
// returns those in the claim itself.
func configurations(claim *resourceapi.ResourceClaim) []configuration {
	var found []configuration
	if claim.Status.Allocation == nil {
		for _, config := range claim.Spec.Devices.Config {
			found = append(found, configuration{config.Requests, config.Opaque, false})
		}
		return found
	}
	for _, config := range claim.Status.Allocation.Devices.Config {
		isOfClass := config.Source == resourceapi.AllocationConfigSourceClass
		found = append(found, configuration{config.Requests, config.Opaque, isOfClass})
	}
	return found
}

// concerns reports whether a configuration for these requests applies to the given request, or to the parent of a subrequest.
func concerns(requests []string, request string) bool {
	return slices.Contains(requests, request) || slices.Contains(requests, Base(request))
}

// Base returns the request of a subrequest, as in "disk" of "disk/large".
func Base(request string) string {
	before, _, _ := strings.Cut(request, "/")
	return before
}

func merge(into *Function, raw []byte) error {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	into.APIVersion, into.Kind = "", ""
	if err := decoder.Decode(into); err != nil {
		return fmt.Errorf("not %s of %s: %w", Kind, APIVersion, err)
	}
	return into.check()
}

func (f *Function) check() error {
	switch {
	case f.APIVersion != APIVersion || f.Kind != Kind:
		return fmt.Errorf("%s of %q: use kind %s of %s", f.Kind, f.APIVersion, Kind, APIVersion)
	case f.Data != "" && f.Data != Keep && f.Data != Wipe:
		return fmt.Errorf("data %q: use %s or %s", f.Data, Keep, Wipe)
	case !ownerForm.MatchString(f.Owner):
		return fmt.Errorf("owner %q: use numbers, as in 107, 107:107 or :107", f.Owner)
	case f.Mode != "" && !modeForm.MatchString(f.Mode):
		return fmt.Errorf("mode %q: use octal digits, as in 0660", f.Mode)
	case f.Queues < 0 || f.Queues > 64:
		return fmt.Errorf("queues %d: use 1 to 64", f.Queues)
	case f.Weight < 0 || f.Weight > 1000:
		return fmt.Errorf("weight %d: use 1 to 1000", f.Weight)
	}
	return nil
}

// DataPolicy returns the policy for a claim's data after its last pod has ended: the one in the parameters, or else the default.
func (f *Function) DataPolicy(claim *resourceapi.ResourceClaim) Data {
	if f.Data != "" {
		return f.Data
	}
	for _, owner := range claim.OwnerReferences {
		if owner.APIVersion == "v1" && owner.Kind == "Pod" {
			return Wipe
		}
	}
	return Keep
}
