package names

import (
	"regexp"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

func TestLeasesNameTheirClaims(t *testing.T) {
	// The server accepts ids of this form (docs/options.md).
	id := regexp.MustCompile(`^[A-Za-z][A-Za-z0-9._-]{0,63}$`)
	const claim types.UID = "6c9a6d0f-5b3e-4d5f-9a60-0a1b2c3d4e5f"
	for index := range 32 {
		lease := Lease(claim, index)
		if found, is := Claim(lease); !id.MatchString(lease) || !is || found != claim {
			t.Errorf("%s is a lease of %s, %v", lease, found, is)
		}
	}
	for _, other := range []string{"", "claim-", "claim-7", "claim-../../../../../../../../etc/hosts.allow.", "vm1", "claim-6c9a6d0f-5b3e-4d5f-9a60-0a1b2c3d4e5f0"} {
		if found, is := Claim(other); is {
			t.Errorf("%q is a lease of %s", other, found)
		}
	}
}
