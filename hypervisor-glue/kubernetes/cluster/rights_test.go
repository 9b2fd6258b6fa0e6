package cluster_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"nvme-mpt.internal/kubernetes/cluster/internal/plane"
	"nvme-mpt.internal/kubernetes/internal/names"
)

const (
	driverNamespace = "nvme-mpt"
	// probe is the user agent of this test's own requests, by which the audit log distinguishes them from the driver's.
	probe = "probe"
)

// event is a line of the API server's audit log.
type event struct {
	Verb      string `json:"verb"`
	UserAgent string `json:"userAgent"`
	User      struct {
		Username string `json:"username"`
	} `json:"user"`
	Object struct {
		Group       string `json:"apiGroup"`
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
	} `json:"objectRef"`
	Response struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"responseStatus"`
}

// requests returns the requests of the driver's accounts to the API server, without those of this test.
func requests(t *testing.T) []event {
	t.Helper()
	log, err := os.Open(plane.AuditLog)
	must(t, err)
	defer log.Close()
	var all []event
	lines := bufio.NewScanner(log)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line event
		must(t, json.Unmarshal(lines.Bytes(), &line))
		if line.UserAgent != probe {
			all = append(all, line)
		}
	}
	must(t, lines.Err())
	return all
}

// right returns the name of a right: a verb on a kind of objects.
func right(verb, group, resource, subresource string) string {
	if subresource != "" {
		resource += "/" + subresource
	}
	return fmt.Sprintf("%s %s.%s", verb, resource, group)
}

func (c *cluster) granted(t *testing.T, role string) map[string]bool {
	t.Helper()
	found, err := c.client.RbacV1().ClusterRoles().Get(t.Context(), role, metav1.GetOptions{})
	must(t, err)
	rights := map[string]bool{}
	for _, rule := range found.Rules {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					rights[right(verb, group, resource, "")] = true
				}
			}
		}
	}
	return rights
}

// as returns a client that acts as the driver: it uses the token that kubelet has mounted into the pod of this account.
func (c *cluster) as(t *testing.T, account string) kubernetes.Interface {
	t.Helper()
	pods, err := c.client.CoreV1().Pods(driverNamespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=" + account})
	must(t, err)
	if len(pods.Items) != 1 {
		t.Fatalf("there are %d pods of %s", len(pods.Items), account)
	}
	pattern := filepath.Join(plane.KubeletDir, "pods", string(pods.Items[0].UID), "volumes", "kubernetes.io~projected", "*", "token")
	tokens, err := filepath.Glob(pattern)
	must(t, err)
	if len(tokens) != 1 {
		t.Fatalf("%s has %v", account, tokens)
	}
	config := rest.AnonymousClientConfig(c.plane.Config)
	config.BearerTokenFile, config.UserAgent = tokens[0], probe
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	return client
}

func slice(name, node, driver string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: &node,
			Pool: resourceapi.ResourcePool{Name: node, ResourceSliceCount: 1},
		},
	}
}

func TestTheRightsOfTheManifestSuffice(t *testing.T) {
	c := theCluster(t)
	_, err := c.comer(t.Context(), "alone", gib)
	must(t, err)
	c.awaitClean(t)
	used := map[string]map[string]bool{}
	for _, request := range requests(t) {
		account := strings.TrimPrefix(request.User.Username, "system:serviceaccount:nvme-mpt:")
		if request.Response.Code == http.StatusForbidden || request.Response.Code == http.StatusUnauthorized {
			t.Errorf("%s was refused: %+v", account, request)
		}
		if request.Object.Resource != "" {
			if used[account] == nil {
				used[account] = map[string]bool{}
			}
			used[account][right(request.Verb, request.Object.Group, request.Object.Resource, request.Object.Subresource)] = true
		}
	}
	for _, account := range []string{"nvme-mpt-node", "nvme-mpt-hold"} {
		if len(used[account]) == 0 {
			t.Errorf("%s asked for nothing", account)
		}
		unused := c.granted(t, account)
		maps.DeleteFunc(unused, func(right string, _ bool) bool { return used[account][right] })
		t.Logf("%s used %v; it has, and did not use until now, %v", account,
			slices.Sorted(maps.Keys(used[account])), slices.Sorted(maps.Keys(unused)))
	}
}

func TestTheDriverMayDoNoMoreThanItsManifestAllows(t *testing.T) {
	c := theCluster(t)
	ctx, administrator := t.Context(), c.client.ResourceV1()
	node, hold := c.as(t, "nvme-mpt-node"), c.as(t, "nvme-mpt-hold")
	slices := func(client kubernetes.Interface) func(*resourceapi.ResourceSlice) error {
		return func(slice *resourceapi.ResourceSlice) error {
			_, err := client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{})
			return err
		}
	}
	// The node's plugin can see these slices of another node and of another driver, but may not change them.
	_, err := administrator.ResourceSlices().Create(ctx, slice("of-another-node", "worker-2", names.Driver), metav1.CreateOptions{})
	must(t, err)
	_, err = administrator.ResourceSlices().Create(ctx, slice("of-another-driver", plane.Node, "other.internal"), metav1.CreateOptions{})
	must(t, err)
	must(t, c.claim(ctx, "claimant", large, gib))
	c.awaitRunning(t, "claimant")
	all, err := administrator.ResourceClaims(tenants).List(ctx, metav1.ListOptions{})
	must(t, err)
	if len(all.Items) != 1 {
		t.Fatalf("claims %v", all.Items)
	}
	claim := &all.Items[0]
	changed := func(client kubernetes.Interface) error {
		_, err := client.ResourceV1().ResourceClaims(tenants).Update(ctx, claim, metav1.UpdateOptions{})
		return err
	}
	of := func(_ any, err error) error { return err }
	patch := []byte(`{"metadata":{"labels":{"a":"b"}}}`)

	// Requests that are allowed succeed with the same clients. So a refusal below has no other cause than missing rights.
	must(t, of(node.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})))
	must(t, of(node.CoreV1().Nodes().Get(ctx, plane.Node, metav1.GetOptions{})))
	must(t, of(hold.ResourceV1().ResourceClaims(tenants).Get(ctx, claim.Name, metav1.GetOptions{})))
	must(t, of(node.ResourceV1().ResourceClaims(tenants).Get(ctx, claim.Name, metav1.GetOptions{})))

	for _, attempt := range []struct {
		what string
		err  error
	}{
		{"a slice of another node is made", slices(node)(slice("a", "worker-2", names.Driver))},
		{"a slice of another driver is made", slices(node)(slice("b", plane.Node, "other.internal"))},
		{"a slice of another node is deleted", node.ResourceV1().ResourceSlices().Delete(ctx, "of-another-node", metav1.DeleteOptions{})},
		{"a slice of another driver is deleted", node.ResourceV1().ResourceSlices().Delete(ctx, "of-another-driver", metav1.DeleteOptions{})},
		{"a slice of another node is changed", of(node.ResourceV1().ResourceSlices().Patch(ctx, "of-another-node", types.MergePatchType, patch, metav1.PatchOptions{}))},
		{"a claim is changed", changed(node)},
		{"a claim's status is changed", of(node.ResourceV1().ResourceClaims(tenants).UpdateStatus(ctx, claim, metav1.UpdateOptions{}))},
		{"a claim is deleted", node.ResourceV1().ResourceClaims(tenants).Delete(ctx, claim.Name, metav1.DeleteOptions{})},
		{"pods are read", of(node.CoreV1().Pods(tenants).List(ctx, metav1.ListOptions{}))},
		{"secrets are read", of(node.CoreV1().Secrets(tenants).List(ctx, metav1.ListOptions{}))},
		{"nodes are listed", of(node.CoreV1().Nodes().List(ctx, metav1.ListOptions{}))},
		{"a node is changed", of(node.CoreV1().Nodes().Patch(ctx, plane.Node, types.MergePatchType, patch, metav1.PatchOptions{}))},
		{"hold reads slices", of(hold.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{}))},
		{"hold changes a claim", changed(hold)},
		{"hold deletes a claim", hold.ResourceV1().ResourceClaims(tenants).Delete(ctx, claim.Name, metav1.DeleteOptions{})},
		{"hold reads pods", of(hold.CoreV1().Pods(tenants).List(ctx, metav1.ListOptions{}))},
		{"hold reads secrets", of(hold.CoreV1().Secrets(tenants).List(ctx, metav1.ListOptions{}))},
	} {
		// An admission policy refuses with the error that the object is not valid.
		if !apierrors.IsForbidden(attempt.err) && !(apierrors.IsInvalid(attempt.err) && strings.Contains(attempt.err.Error(), "ValidatingAdmissionPolicy")) {
			t.Errorf("%s: %v", attempt.what, attempt.err)
		}
	}
	must(t, errors.Join(
		administrator.ResourceSlices().Delete(ctx, "of-another-driver", metav1.DeleteOptions{}),
		c.deletePod(ctx, "claimant"),
	))
	// The slice may be deleted already, since the node that it names does not exist.
	if err := administrator.ResourceSlices().Delete(ctx, "of-another-node", metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		must(t, err)
	}
	c.awaitClean(t)
}
