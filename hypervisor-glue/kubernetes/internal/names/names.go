// Package names has the names that this driver is known by in a cluster.
package names

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

const (
	// Driver is the name of the DRA driver, and the domain of its attributes, taints and parameters. The top-level
	// domain "internal" is reserved for private use, so it belongs to no other vendor.
	Driver = "nvme-mpt.internal"
	// CDIKind is the vendor and class of the CDI devices.
	CDIKind = Driver + "/function"

	// Size is the capacity of bytes.
	Size = "size"
	// Queues is the capacity of I/O queue pairs of a physical drive that belong to one lease.
	Queues = "queues"
	// IOPS is the capacity of I/O commands per second.
	IOPS = "iops"
	// Bandwidth is the capacity of bytes per second.
	Bandwidth = "bandwidth"

	leasePrefix = "claim-"
)

// Lease returns the id of the lease of a claim's allocation result. The id begins with a letter, as the server asks for.
func Lease(claim types.UID, index int) string {
	if index == 0 {
		return leasePrefix + string(claim)
	}
	return fmt.Sprintf("%s%s.%d", leasePrefix, claim, index)
}

// Claim returns the UID of the claim that a lease belongs to, and false for a lease of no claim.
func Claim(lease string) (types.UID, bool) {
	const uidLength = 36
	rest, found := strings.CutPrefix(lease, leasePrefix)
	if !found || len(rest) < uidLength {
		return "", false
	}
	if len(rest) > uidLength && rest[uidLength] != '.' {
		return "", false
	}
	uid := rest[:uidLength]
	if strings.Trim(uid, "0123456789abcdef-") != "" {
		return "", false
	}
	return types.UID(uid), true
}
