// Package devices describes the drives of a node as devices for the scheduler.
package devices

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"sort"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/server"
)

const (
	// TaintFailed marks a drive that has failed or was removed.
	TaintFailed = names.Driver + "/failed"
	// TaintWarning marks a drive with health warnings. The taint's value lists the reasons.
	TaintWarning = names.Driver + "/warning"
	// TaintUnreachable marks drives whose server does not answer.
	TaintUnreachable = names.Driver + "/unreachable"

	healthOK      = "ok"
	healthWarning = "warning"
	healthFailed  = "failed"

	// betweenReasons separates two reasons. A taint's value follows the rules of labels: neither commas nor blanks.
	betweenReasons = "."

	// attributeLength is the maximum length of a text attribute.
	attributeLength = resourceapi.DeviceAttributeMaxValueLength
	pciBusID        = "resource.kubernetes.io/pciBusID"
)

// Rate is a capacity that drives do not report, so the operator estimates it.
type Rate struct {
	// Total is the sum that all claims can get; 0 if the capacity is not published.
	Total int64
	// Default is the amount that a request without an amount consumes; 0 if such a request has no limit.
	Default int64
}

// Rates has the capacities of a drive that the operator has set.
type Rates struct {
	IOPS, Bandwidth Rate
}

// Facts are the server's reports about a node.
type Facts struct {
	Drives     []server.Drive
	Capacities []server.DriveCapacity
	Leases     []server.Lease
	HostDrives []server.HostDrive
	// IsCounted reports whether the scheduler already counts the lease against the drive.
	IsCounted func(lease string) bool
}

var (
	pciAddress  = regexp.MustCompile(`^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	notInLabels = regexp.MustCompile(`[^a-z0-9]+`)
)

// Name returns the device name of a drive: from its PCI address, or else from its path.
func Name(drive string) string {
	label := strings.Trim(notInLabels.ReplaceAllString(strings.ToLower(drive), "-"), "-")
	if pciAddress.MatchString(drive) {
		return "pci-" + label
	}
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(drive)) // It never fails.
	const labelLength = 48
	label = strings.Trim(label[max(0, len(label)-labelLength):], "-")
	return strings.TrimPrefix(fmt.Sprintf("%s-%08x", label, hash.Sum32()), "-")
}

// IsPhysical reports whether a drive is a PCI function, which can have several namespaces.
func IsPhysical(drive string) bool {
	return pciAddress.MatchString(drive)
}

// NameOf returns the device name of a namespace: the drive's name, to which the namespace's number is appended if it is not the
// first one.
func NameOf(capacity server.DriveCapacity) string {
	if !IsPhysical(capacity.Drive) || capacity.NSID <= 1 {
		return Name(capacity.Drive)
	}
	return fmt.Sprintf("%s-n%d", Name(capacity.Drive), capacity.NSID)
}

// isPublished reports whether claims can use a drive: its data must outlive the server.
func isPublished(drive string) bool {
	return !strings.HasPrefix(drive, "memory:") && !strings.HasPrefix(drive, "null:")
}

// Of returns the devices for all namespaces of all drives, sorted by name.
func Of(facts Facts, rates Rates) []resourceapi.Device {
	capacities := make(map[string][]server.DriveCapacity, len(facts.Capacities))
	for _, capacity := range facts.Capacities {
		capacities[capacity.Drive] = append(capacities[capacity.Drive], capacity)
	}
	var all []resourceapi.Device
	for _, drive := range facts.Drives {
		if !isPublished(drive.Path) {
			continue
		}
		namespaces := capacities[drive.Path]
		sort.Slice(namespaces, func(i, j int) bool { return namespaces[i].NSID < namespaces[j].NSID })
		whole := rates
		for _, capacity := range namespaces {
			all = append(all, device(drive, capacity, facts, whole))
			// The capacities of the whole drive, such as queue pairs, are published with the first namespace alone, so that the
			// scheduler counts them once.
			drive.QueuePairs, whole = nil, Rates{}
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}

func device(drive server.Drive, capacity server.DriveCapacity, facts Facts, rates Rates) resourceapi.Device {
	device := resourceapi.Device{
		Name:                     NameOf(capacity),
		AllowMultipleAllocations: new(true),
		Attributes:               attributes(drive, capacity, facts),
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			names.Size: size(capacity, facts.IsCounted),
		},
	}
	if pairs := drive.QueuePairs; pairs != nil {
		device.Capacity[names.Queues] = amount(queues(pairs, capacity, facts), resource.DecimalSI, 0)
	}
	if rate := rates.IOPS; rate.Total > 0 {
		device.Capacity[names.IOPS] = amount(rate.Total, resource.DecimalSI, rate.Default)
	}
	if rate := rates.Bandwidth; rate.Total > 0 {
		device.Capacity[names.Bandwidth] = amount(rate.Total, resource.BinarySI, rate.Default)
	}
	if drive.Gone {
		device.Taints = append(device.Taints, resourceapi.DeviceTaint{
			Key:    TaintFailed,
			Effect: resourceapi.DeviceTaintEffectNoSchedule,
		})
	}
	if reasons := warnings(drive); reasons != "" {
		device.Taints = append(device.Taints, resourceapi.DeviceTaint{
			Key:    TaintWarning,
			Value:  reasons,
			Effect: resourceapi.DeviceTaintEffectNoSchedule,
		})
	}
	return device
}

// warnings returns the reasons of a drive's health warnings; none for a failed drive, whose last report is old.
func warnings(drive server.Drive) string {
	if drive.Gone {
		return ""
	}
	return strings.Join(drive.CriticalWarning.Reasons(), betweenReasons)
}

func attributes(drive server.Drive, capacity server.DriveCapacity, facts Facts) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	text := func(value string) resourceapi.DeviceAttribute {
		value = strings.TrimSpace(value)
		return resourceapi.DeviceAttribute{StringValue: new(value[:min(len(value), attributeLength)])}
	}
	health, reasons := healthOK, warnings(drive)
	switch {
	case drive.Gone:
		health = healthFailed
	case reasons != "":
		health = healthWarning
	}
	kind := "software"
	if IsPhysical(drive.Path) {
		kind = "physical"
	}
	found := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"model":   text(drive.Model),
		"health":  text(health),
		"kind":    text(kind),
		"lbaSize": {IntValue: new(capacity.LBABytes)},
	}
	if reasons != "" {
		found["warnings"] = text(reasons)
	}
	if IsPhysical(drive.Path) && capacity.NSID > 0 {
		found["namespace"] = resourceapi.DeviceAttribute{IntValue: new(capacity.NSID)}
	}
	for _, host := range facts.HostDrives {
		if host.Address != drive.Path {
			continue
		}
		found[pciBusID] = text(host.Address)
		if host.NUMANode != nil {
			found["numaNode"] = resourceapi.DeviceAttribute{IntValue: host.NUMANode}
		}
	}
	return found
}

// size returns the capacity in bytes: the free bytes plus those that the scheduler already counts.
func size(capacity server.DriveCapacity, isCounted func(string) bool) resourceapi.DeviceCapacity {
	bytes := capacity.Free
	for _, use := range capacity.Uses {
		if isCounted(use.ID) {
			bytes += use.Bytes
		}
	}
	bytes -= bytes % capacity.Unit
	quantity := func(bytes int64) *resource.Quantity { return resource.NewQuantity(bytes, resource.BinarySI) }
	published := resourceapi.DeviceCapacity{Value: *quantity(bytes)}
	switch unit := capacity.Unit; {
	case bytes >= 2*unit:
		published.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default:    quantity(unit),
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity(unit), Step: quantity(unit)},
		}
	case bytes == unit:
		// The capacity has a single valid value, because the rest is too small for a range with a step.
		published.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default:     quantity(unit),
			ValidValues: []resource.Quantity{*quantity(unit)},
		}
	}
	return published
}

// queues returns the total number of queue pairs that claims can reserve. One pair of the drive stays for shared queues.
func queues(pairs *server.QueuePairs, capacity server.DriveCapacity, facts Facts) int64 {
	others := pairs.Reserved
	here := make(map[string]bool, len(capacity.Uses))
	for _, use := range capacity.Uses {
		here[use.ID] = true
	}
	for _, lease := range facts.Leases {
		if here[lease.ID] && facts.IsCounted(lease.ID) {
			others -= lease.ReservedPairs
		}
	}
	return max(0, pairs.Total-1-max(0, others))
}

func amount(total int64, format resource.Format, byDefault int64) resourceapi.DeviceCapacity {
	return resourceapi.DeviceCapacity{
		Value: *resource.NewQuantity(total, format),
		RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: resource.NewQuantity(min(byDefault, total), format),
		},
	}
}

// Unreachable returns the devices with a taint that says that their server does not answer.
func Unreachable(all []resourceapi.Device) []resourceapi.Device {
	tainted := make([]resourceapi.Device, 0, len(all))
	for i := range all {
		device := all[i].DeepCopy()
		device.Taints = append(device.Taints, resourceapi.DeviceTaint{
			Key:    TaintUnreachable,
			Effect: resourceapi.DeviceTaintEffectNoSchedule,
		})
		tainted = append(tainted, *device)
	}
	return tainted
}
