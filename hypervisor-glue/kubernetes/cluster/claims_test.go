package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nvme-mpt.internal/kubernetes/internal/claims"
	"nvme-mpt.internal/kubernetes/internal/server"
)

// scratch is the folder with the function's socket in the container of each pod.
const scratch = "/run/nvme-mpt/scratch/disk"

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// awaitRunning waits until the pods run, each with its function.
func (c *cluster) awaitRunning(t *testing.T, pods ...string) {
	t.Helper()
	for _, name := range pods {
		c.await(t, "pod "+name, func() error { return c.running(t.Context(), name, scratch) })
	}
}

// awaitAgreement waits until the ledger has a lease for each allocated claim in the API server, and no other lease. The claim
// of a deleted pod is deleted a moment after the pod.
func (c *cluster) awaitAgreement(t *testing.T) {
	t.Helper()
	c.await(t, "agreement of ledger and API server", func() error { return c.agree(t.Context()) })
}

// awaitClean waits until no claim is left, and no pod, function, lease, data or file of a claim.
func (c *cluster) awaitClean(t *testing.T) {
	t.Helper()
	began := time.Now()
	c.await(t, "the end of all that claims had", func() error { return c.clean(t.Context()) })
	t.Logf("nothing was left after %.1f s", time.Since(began).Seconds())
}

// waits checks that the pod is pending because the scheduler has found no drive for its claim.
func (c *cluster) waits(ctx context.Context, name string) error {
	pod, err := c.client.CoreV1().Pods(tenants).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Reason == corev1.PodReasonUnschedulable {
			return nil
		}
	}
	return fmt.Errorf("pod %s is %s: %v", name, pod.Status.Phase, pod.Status.Conditions)
}

func TestTheThirdOfThreeClaimsWaitsForTheEndOfTheSecond(t *testing.T) {
	c := theCluster(t)
	// The first two claims leave one of the drive's eight units of 1 GiB free, too few for the third claim.
	must(t, c.claim(t.Context(), "first", small, 6*gib))
	must(t, c.claim(t.Context(), "second", small, gib))
	c.awaitRunning(t, "first", "second")
	must(t, c.claim(t.Context(), "third", small, 2*gib))
	c.await(t, "the scheduler's refusal", func() error { return c.waits(t.Context(), "third") })
	c.awaitAgreement(t)
	must(t, c.deletePod(t.Context(), "second"))
	c.awaitRunning(t, "first", "third")
	c.await(t, "the end of the second pod", func() error { return c.gone(t.Context(), "second") })
	c.awaitAgreement(t)
	must(t, c.deletePod(t.Context(), "first"))
	must(t, c.deletePod(t.Context(), "third"))
	c.awaitClean(t)
}

func TestAClaimThatKeepsItsDataOutlivesItsPod(t *testing.T) {
	c := theCluster(t)
	must(t, c.apply(t.Context(), "../manifests/examples/kept-claim.yaml"))
	const name = "database"
	kept := corev1.PodResourceClaim{Name: "disk", ResourceClaimName: new(name)}
	for _, pod := range []string{"before", "after"} {
		must(t, c.pod(t.Context(), pod, kept))
		c.await(t, "pod "+pod, func() error { return c.running(t.Context(), pod, "/run/nvme-mpt/database/disk") })
		c.awaitAgreement(t)
		must(t, c.deletePod(t.Context(), pod))
		c.await(t, "the end of its function", func() error {
			functions, err := c.server.Functions(t.Context())
			if err == nil && len(functions) > 0 {
				err = fmt.Errorf("there are %v", functions)
			}
			return errors.Join(err, c.gone(t.Context(), pod))
		})
		claim, err := (claims.Cluster{Client: c.client}).Get(t.Context(), tenants, name)
		must(t, err)
		if claim == nil || !claims.IsHeld(claim) || len(claims.Results(claim)) != 1 {
			t.Fatalf("the claim is not held: %v", claim)
		}
		// The ledger still has the claim's data, although no pod uses the claim.
		c.awaitAgreement(t)
	}
	must(t, c.client.ResourceV1().ResourceClaims(tenants).Delete(t.Context(), name, metav1.DeleteOptions{}))
	c.awaitClean(t)
}

func TestTheExampleOfAPodRuns(t *testing.T) {
	c := theCluster(t)
	must(t, c.apply(t.Context(), "../manifests/examples/pod.yaml"))
	c.awaitRunning(t, "vm")
	c.awaitAgreement(t)
	must(t, c.deletePod(t.Context(), "vm"))
	must(t, c.client.ResourceV1().ResourceClaimTemplates(tenants).Delete(t.Context(), "scratch-disk", metav1.DeleteOptions{}))
	c.awaitClean(t)
}

// kubelet is killed while two pods run. One of the pods is deleted before kubelet is started again.
func TestPodsOutliveAKubeletThatIsRestarted(t *testing.T) {
	c := theCluster(t)
	must(t, c.claim(t.Context(), "stays", large, 2*gib))
	must(t, c.claim(t.Context(), "goes", large, 3*gib))
	c.awaitRunning(t, "stays", "goes")
	containers := func() map[string]string {
		ids := map[string]string{}
		for _, container := range c.runtime.Containers(tenants) {
			ids[container.Pod] = container.ID
		}
		return ids
	}
	functions := func() map[string]server.Function {
		list, err := c.server.Functions(t.Context())
		must(t, err)
		all := map[string]server.Function{}
		for _, function := range list {
			all[function.ID] = function
		}
		return all
	}
	container, offered := containers()["stays"], functions()
	c.plane.KillKubelet()
	must(t, c.deletePod(t.Context(), "goes"))
	if now := functions(); len(now) != 2 {
		t.Errorf("without kubelet, there are %v", now)
	}
	must(t, c.plane.StartKubelet())
	c.await(t, "the end of the pod that was deleted", func() error { return c.gone(t.Context(), "goes") })
	must(t, c.claim(t.Context(), "comes", large, gib))
	c.awaitRunning(t, "stays", "comes")
	c.awaitAgreement(t)
	if now := containers()["stays"]; now != container {
		t.Errorf("container %s took the place of %s", now, container)
	}
	same := 0
	for id, function := range functions() {
		if before, wasThere := offered[id]; wasThere && before.Socket == function.Socket {
			same++
		}
	}
	if same != 1 {
		t.Errorf("of %v, there are %v", offered, functions())
	}
	must(t, c.deletePod(t.Context(), "stays"))
	must(t, c.deletePod(t.Context(), "comes"))
	c.awaitClean(t)
}

const (
	comers = 50
	// atOnce is the number of claims that exist at the same time.
	atOnce = 10
)

// comeAndGo creates pods with claims and deletes them again, several at the same time. It returns the sorted times in seconds
// from the creation of each claim until its pod runs.
func (c *cluster) comeAndGo(t *testing.T) []float64 {
	t.Helper()
	var (
		mutex   sync.Mutex
		seconds []float64
		failed  error
		workers sync.WaitGroup
	)
	for worker := range atOnce {
		workers.Go(func() {
			for round := range comers / atOnce {
				name := fmt.Sprintf("comer-%d-%d", worker, round)
				took, err := c.comer(t.Context(), name, int64(1+round)*gib)
				mutex.Lock()
				seconds, failed = append(seconds, took.Seconds()), errors.Join(failed, err)
				mutex.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	workers.Wait()
	must(t, failed)
	slices.Sort(seconds)
	return seconds
}

// comer creates a pod with a claim, waits until the pod runs, and deletes the pod. It returns the time until the pod ran.
func (c *cluster) comer(ctx context.Context, name string, size int64) (time.Duration, error) {
	began := time.Now()
	if err := c.claim(ctx, name, large, size); err != nil {
		return 0, err
	}
	err := c.wait(ctx, "pod "+name, func() error { return c.running(ctx, name, scratch) })
	took := time.Since(began)
	if err != nil {
		return 0, err
	}
	if err := c.deletePod(ctx, name); err != nil {
		return 0, err
	}
	return took, c.wait(ctx, "the end of pod "+name, func() error { return c.gone(ctx, name) })
}

func report(t *testing.T, seconds []float64) {
	t.Helper()
	t.Logf("seconds from claim to running pod: %.1f at least, %.1f in the middle, %.1f at most of %d",
		seconds[0], seconds[len(seconds)/2], seconds[len(seconds)-1], len(seconds))
}

func TestFiftyClaimsComeAndGo(t *testing.T) {
	c := theCluster(t)
	for range 3 {
		took, err := c.comer(t.Context(), "alone", gib)
		must(t, err)
		t.Logf("a claim by itself had a running pod after %.1f s", took.Seconds())
		c.awaitClean(t)
	}
	report(t, c.comeAndGo(t))
	c.awaitClean(t)
}

func TestThePluginIsKilledWhileFiftyClaimsComeAndGo(t *testing.T) {
	c := theCluster(t)
	var kills atomic.Int64
	// While one container is created, other claims are being prepared or unprepared. So the plugin is killed at different
	// points of its work.
	kill := func(number int) {
		if number%5 == 0 {
			kills.Add(int64(c.runtime.KillProcesses(driverImage)))
		}
	}
	c.created.Store(&kill)
	defer c.created.Store(nil)
	report(t, c.comeAndGo(t))
	c.created.Store(nil)
	if kills.Load() == 0 {
		t.Error("the plugin was not killed")
	}
	t.Logf("the programs of the driver were killed %d times", kills.Load())
	c.awaitClean(t)
	// The plugin was restarted, so another claim is prepared.
	_, err := c.comer(t.Context(), "last", gib)
	must(t, err)
	c.awaitClean(t)
}
