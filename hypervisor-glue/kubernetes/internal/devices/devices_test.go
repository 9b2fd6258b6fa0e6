package devices

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/server"
)

const gib = 1 << 30

func isClaim(lease string) bool {
	_, is := names.Claim(lease)
	return is
}

// facts returns the reports of a server with a physical drive, a drive in a file and a drive in memory.
func facts() Facts {
	return Facts{
		Drives: []server.Drive{
			{Path: "0000:01:00.0", Model: "SAMSUNG MZQL2  ", QueuePairs: &server.QueuePairs{Total: 32}},
			{Path: "/srv/images/Drive.img", Model: "nvme-mpt file drive"},
			{Path: "memory:1G", Model: "nvme-mpt memory drive"},
		},
		Capacities: []server.DriveCapacity{
			{Drive: "0000:01:00.0", Bytes: 300*gib + 4096, LBABytes: 4096, Unit: gib, Free: 300 * gib},
			{Drive: "/srv/images/Drive.img", Bytes: 10 * gib, LBABytes: 512, Unit: gib, Free: 10 * gib},
			{Drive: "memory:1G", Bytes: gib, LBABytes: 512, Unit: gib, Free: gib},
		},
		HostDrives: []server.HostDrive{{Address: "0000:01:00.0", NUMANode: new(int64)}},
		IsCounted:  isClaim,
	}
}

var rates = Rates{
	IOPS:      Rate{Total: 1_000_000},
	Bandwidth: Rate{Total: 6 * gib, Default: gib / 2},
}

func TestDrivesHaveCapacitiesAndAttributes(t *testing.T) {
	all := Of(facts(), rates)
	if len(all) != 2 {
		t.Fatalf("devices %v", all)
	}
	physical, file := all[0], all[1]
	if physical.Name != "pci-0000-01-00-0" || !strings.HasPrefix(file.Name, "srv-images-drive-img-") {
		t.Errorf("names %s and %s", physical.Name, file.Name)
	}
	capacity := func(device resourceapi.Device, name resourceapi.QualifiedName, value, byDefault string) {
		t.Helper()
		found, there := device.Capacity[name]
		if !there || found.Value.String() != value || found.RequestPolicy.Default.String() != byDefault {
			t.Errorf("%s of %s is %v", name, device.Name, found)
		}
	}
	capacity(physical, names.Size, "300Gi", "1Gi")
	capacity(physical, names.Queues, "31", "0")
	capacity(physical, names.IOPS, "1M", "0")
	capacity(physical, names.Bandwidth, "6Gi", "512Mi")
	capacity(file, names.Size, "10Gi", "1Gi")
	if _, there := file.Capacity[names.Queues]; there {
		t.Error("a file has queue pairs")
	}
	attributes := physical.Attributes
	for name, value := range map[resourceapi.QualifiedName]string{
		"model": "SAMSUNG MZQL2", "health": "ok", "kind": "physical", pciBusID: "0000:01:00.0",
	} {
		if found := attributes[name].StringValue; found == nil || *found != value {
			t.Errorf("%s is %v", name, found)
		}
	}
	if *attributes["lbaSize"].IntValue != 4096 || *attributes["numaNode"].IntValue != 0 {
		t.Errorf("attributes %v", attributes)
	}
	if kind := file.Attributes["kind"].StringValue; *kind != "software" {
		t.Errorf("kind %s", *kind)
	}
}

func TestNamespacesOfADriveHaveDevicesOfTheirOwn(t *testing.T) {
	found := facts()
	found.Capacities[0].NSID = 1
	second := server.DriveCapacity{Drive: "0000:01:00.0", NSID: 2, Bytes: 50 * gib, LBABytes: 512, Unit: gib, Free: 50 * gib}
	found.Capacities = append([]server.DriveCapacity{second}, found.Capacities...)
	all := Of(found, rates)
	if len(all) != 3 || all[0].Name != "pci-0000-01-00-0" || all[1].Name != "pci-0000-01-00-0-n2" {
		t.Fatalf("devices %v", all)
	}
	for index, value := range []string{"300Gi", "50Gi"} {
		size := all[index].Capacity[names.Size]
		if size.Value.String() != value || *all[index].Attributes["namespace"].IntValue != int64(index)+1 {
			t.Errorf("device %v", all[index])
		}
	}
	// These capacities belong to the drive as a whole, so only the device of its first namespace has them.
	for _, name := range []resourceapi.QualifiedName{names.Queues, names.IOPS, names.Bandwidth} {
		_, first := all[0].Capacity[name]
		_, second := all[1].Capacity[name]
		if !first || second {
			t.Errorf("%s of the first: %t, of the second: %t", name, first, second)
		}
	}
	if _, there := all[2].Capacity[names.IOPS]; !there {
		t.Error("the next drive has no IOPS")
	}
}

func TestWhatTheSchedulerCountsStaysInTheCapacity(t *testing.T) {
	claim := names.Lease("00000000-0000-4000-8000-000000000001", 0)
	gone := names.Lease("00000000-0000-4000-8000-000000000002", 0)
	found := facts()
	found.Capacities[0].Free = 170 * gib
	found.Capacities[0].Uses = []server.Use{
		{ID: claim, Bytes: 100 * gib, Leased: true},
		{ID: gone, Bytes: 20 * gib},
		{ID: "by-hand", Bytes: 10 * gib, Leased: true},
	}
	found.Drives[0].QueuePairs = &server.QueuePairs{Total: 32, Reserved: 7}
	found.Leases = []server.Lease{{ID: claim, ReservedPairs: 4}, {ID: "by-hand", ReservedPairs: 3}}
	found.IsCounted = func(lease string) bool { return isClaim(lease) && lease != gone }
	device := Of(found, rates)[0]
	size, queues := device.Capacity[names.Size], device.Capacity[names.Queues]
	if size.Value.String() != "270Gi" || queues.Value.String() != "28" {
		t.Errorf("size %s, queues %s", &size.Value, &queues.Value)
	}
}

func TestPoliciesAreValidHoweverLittleIsLeft(t *testing.T) {
	for _, test := range []struct {
		free   int64
		policy string
	}{{0, "none"}, {gib, "values"}, {2 * gib, "range"}} {
		found := facts()
		found.Capacities[0].Free = test.free
		size := Of(found, rates)[0].Capacity[names.Size]
		policy := "none"
		if size.RequestPolicy != nil && size.RequestPolicy.ValidRange != nil {
			policy = "range"
			// The API server requires that min + step is at most the capacity.
			least := size.RequestPolicy.ValidRange.Min.Value() + size.RequestPolicy.ValidRange.Step.Value()
			if least > size.Value.Value() {
				t.Errorf("%d is too little for a range", test.free)
			}
		} else if size.RequestPolicy != nil {
			policy = "values"
		}
		if policy != test.policy || size.Value.Value() != test.free {
			t.Errorf("%d bytes have the policy %s", test.free, policy)
		}
	}
}

func TestDrivesThatFailedAreTainted(t *testing.T) {
	found := facts()
	found.Drives[0].Gone = true
	all := Of(found, rates)
	if *all[0].Attributes["health"].StringValue != "failed" || all[0].Taints[0].Key != TaintFailed || len(all[1].Taints) > 0 {
		t.Errorf("devices %v", all)
	}
	// The drive works again, so its taint is removed.
	found.Drives[0].Gone = false
	if all := Of(found, rates); len(all[0].Taints) > 0 {
		t.Errorf("taints %v", all[0].Taints)
	}
	tainted := Unreachable(all)
	if len(tainted[0].Taints) != 2 || tainted[1].Taints[0].Key != TaintUnreachable || len(all[1].Taints) > 0 {
		t.Errorf("taints %v", tainted)
	}
}

func TestDrivesThatWarnOfTheirHealthAreTaintedWithTheReasons(t *testing.T) {
	for _, test := range []struct {
		warning         server.Warnings
		health, reasons string
	}{
		{0, "ok", ""},
		{server.WarningTemperature, "warning", "temperature"},
		{server.WarningSpare | server.WarningReadOnly, "warning", "spare.read-only"},
		{server.WarningReliability | server.WarningBackup, "warning", "reliability.backup"},
		// These bits are not reported: the one of the Persistent Memory Region, and reserved bits.
		{0b1110_0000, "ok", ""},
		{0xff, "warning", "spare.temperature.reliability.read-only.backup"},
	} {
		found := facts()
		found.Drives[0].CriticalWarning = test.warning
		all := Of(found, rates)
		device := all[0]
		if health := *device.Attributes["health"].StringValue; health != test.health {
			t.Errorf("%08b: health %s", test.warning, health)
		}
		reasons, there := device.Attributes["warnings"]
		if there != (test.reasons != "") || (there && *reasons.StringValue != test.reasons) {
			t.Errorf("%08b: warnings %v", test.warning, reasons)
		}
		var taints []resourceapi.DeviceTaint
		if test.reasons != "" {
			taints = []resourceapi.DeviceTaint{{
				Key: TaintWarning, Value: test.reasons, Effect: resourceapi.DeviceTaintEffectNoSchedule,
			}}
		}
		if !slices.Equal(device.Taints, taints) {
			t.Errorf("%08b: taints %v", test.warning, device.Taints)
		}
		if other := all[1]; *other.Attributes["health"].StringValue != "ok" || len(other.Taints) > 0 {
			t.Errorf("the other drive is %v", other)
		}
	}
}

func TestAllNamespacesOfADriveHaveItsWarning(t *testing.T) {
	found := facts()
	found.Capacities[0].NSID = 1
	found.Capacities = append(found.Capacities, server.DriveCapacity{
		Drive: "0000:01:00.0", NSID: 2, Bytes: 50 * gib, LBABytes: 512, Unit: gib, Free: 50 * gib,
	})
	found.Drives[0].CriticalWarning = server.WarningReadOnly
	for _, device := range Of(found, rates)[:2] {
		if len(device.Taints) != 1 || device.Taints[0].Value != "read-only" {
			t.Errorf("device %v", device)
		}
	}
}

func TestADriveThatFailedIsTaintedForThatAlone(t *testing.T) {
	found := facts()
	found.Drives[0].Gone, found.Drives[0].CriticalWarning = true, server.WarningReliability
	device := Of(found, rates)[0]
	if len(device.Taints) != 1 || device.Taints[0].Key != TaintFailed || *device.Attributes["health"].StringValue != "failed" {
		t.Errorf("device %v", device)
	}
}

func TestNamesAreLabelsAndDiffer(t *testing.T) {
	seen := make(map[string]string)
	for _, path := range []string{
		"0000:01:00.0", "10000:e1:00.0", "/srv/a.img", "/srv/a/img", "/srv/A.img", "/dev/nvme0n1", "/",
		"/srv/" + strings.Repeat("long-", 50) + "1", "/srv/" + strings.Repeat("long-", 50) + "2", "/srv/Größe",
	} {
		name := Name(path)
		if len(name) > 63 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || strings.Trim(name, "-") != name {
			t.Errorf("%s is named %s", path, name)
		}
		if other, taken := seen[name]; taken {
			t.Errorf("%s and %s are both named %s", path, other, name)
		}
		seen[name] = path
	}
}
