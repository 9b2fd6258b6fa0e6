// Package names defines the names of this driver in a cluster.
package names

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

const (
	// Driver is the name of the DRA driver, and the domain of its attributes, taints and parameters. The top-level domain
	// "internal" is reserved for private use, so no other vendor owns the name.
	Driver = "nvme-mpt.internal"
	// CDIKind is the vendor and the class of the CDI devices.
	CDIKind = Driver + "/function"

	// Size is the capacity in bytes.
	Size = "size"
	// Queues is the capacity in I/O queue pairs of a physical drive that can be reserved for one lease.
	Queues = "queues"
	// IOPS is the capacity in I/O commands per second.
	IOPS = "iops"
	// Bandwidth is the capacity in bytes per second.
	Bandwidth = "bandwidth"

	leasePrefix = "claim-"
)

// Lease returns the lease id of a claim's allocation result. It begins with a letter, as the server requires.
func Lease(claim types.UID, index int) string {
	if index == 0 {
		return leasePrefix + string(claim)
	}
	return fmt.Sprintf("%s%s.%d", leasePrefix, claim, index)
}

// Claim returns the UID of a lease's claim, and false if the lease belongs to no claim.
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
