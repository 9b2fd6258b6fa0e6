// Package node creates functions for claims on one node, and removes them again.
//
// The ledger of nvme-mpt is the authority for a node, and the API server for the cluster. This package stores no
// state: each call reads the present state and creates what is missing. So if a plugin dies between two steps and is
// restarted, the same call has the same result.
package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"nvme-mpt.internal/kubernetes/internal/cdi"
	"nvme-mpt.internal/kubernetes/internal/claims"
	"nvme-mpt.internal/kubernetes/internal/devices"
	"nvme-mpt.internal/kubernetes/internal/folder"
	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/parameters"
	"nvme-mpt.internal/kubernetes/internal/server"
)

// SocketName is the name of the socket in the folder that is mounted into a container.
const SocketName = "nvme.sock"

// containerRoot contains the socket folders in containers.
const containerRoot = "/run/nvme-mpt"

// DefaultWeight is the weight that the server uses by default.
const DefaultWeight = 100

// podClaimAnnotation has the pod's name for a claim that was created for it from a template.
const podClaimAnnotation = "resource.kubernetes.io/pod-claim-name"

// Cluster is the part of the API server that this package uses.
type Cluster interface {
	// Get returns a claim, or nil if there is none.
	Get(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
	// List returns all claims that exist at present.
	List(ctx context.Context) ([]resourceapi.ResourceClaim, error)
}

// Node creates and removes the functions of claims.
type Node struct {
	// Name is the name of the node and of its pool.
	Name    string
	Server  *server.Server
	Cluster Cluster
	// Folder contains the sockets of claims. Server and container runtimes must see it at the same path.
	Folder string
	CDI    cdi.Folder
	// WeightMax is the maximum weight that a claim may request, unless its class has a larger one; 0 for DefaultWeight.
	WeightMax int64
	// HoldTimeout is the time for which Prepare waits until a claim that keeps its data is held.
	HoldTimeout time.Duration
	// After is called after each step with a lasting effect. Tests end the process there.
	After func(step string)

	mutex sync.Mutex
}

// Prepared is a function that is ready for use by containers.
type Prepared struct {
	Result    resourceapi.DeviceRequestAllocationResult
	CDIDevice string
}

func (n *Node) after(step string) {
	if n.After != nil {
		n.After(step)
	}
}

// state is the present state of a server.
type state struct {
	capacities []server.DriveCapacity
	functions  map[string]server.Function
}

func (n *Node) state(ctx context.Context) (state, error) {
	capacities, err := n.Server.Capacities(ctx)
	if err != nil {
		return state{}, err
	}
	list, err := n.Server.Functions(ctx)
	if err != nil {
		return state{}, err
	}
	functions := make(map[string]server.Function, len(list))
	for _, function := range list {
		functions[function.ID] = function
	}
	return state{capacities, functions}, nil
}

// has returns the capacity report of the namespace on which the id has a lease or data, if there is one.
func (s state) has(id string) (capacity server.DriveCapacity, found bool) {
	for _, capacity := range s.capacities {
		for _, use := range capacity.Uses {
			if use.ID == id {
				return capacity, true
			}
		}
	}
	return server.DriveCapacity{}, false
}

// ids returns the lease ids of claims that have a function, a lease or data.
func (s state) ids() sets.Set[string] {
	found := sets.New[string]()
	add := func(id string) {
		if _, isClaim := names.Claim(id); isClaim {
			found.Insert(id)
		}
	}
	for id := range s.functions {
		add(id)
	}
	for _, capacity := range s.capacities {
		for _, use := range capacity.Uses {
			add(use.ID)
		}
	}
	return found
}

// Prepare creates the functions of an allocated claim, and the CDI devices that mount their sockets into containers.
func (n *Node) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]Prepared, error) {
	wrap := func(err error) error {
		return fmt.Errorf("claim %s/%s (%s): %w", claim.Namespace, claim.Name, claim.UID, err)
	}
	// Waits before taking the lock, so that other claims are not delayed.
	if err := n.awaitHold(ctx, claim); err != nil {
		return nil, wrap(err)
	}
	n.mutex.Lock()
	defer n.mutex.Unlock()
	prepared, err := n.prepare(ctx, claim)
	if err != nil {
		return nil, wrap(err)
	}
	return prepared, nil
}

// holdPause is the poll interval for a claim that must be held.
const holdPause = 200 * time.Millisecond

// awaitHold waits until a claim that keeps its data is held. Without the hold, the claim might be allocated on another
// node after its pod has ended, away from its data.
func (n *Node) awaitHold(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	kept, err := claims.IsKept(claim)
	if err != nil || !kept || claims.IsHeld(claim) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, n.HoldTimeout)
	defer cancel()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("its data is to outlive its pods, and it is not held yet: start `nvme-mpt-dra hold` in the cluster, "+
				"or set data: %s in the claim's parameters", parameters.Wipe)
		case <-time.After(holdPause):
		}
		now, err := n.Cluster.Get(ctx, claim.Namespace, claim.Name)
		if err != nil {
			return err
		}
		if now == nil || now.UID != claim.UID {
			return errors.New("it is gone")
		}
		if claims.IsHeld(now) {
			return nil
		}
	}
}

func (n *Node) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]Prepared, error) {
	now, err := n.state(ctx)
	if err != nil {
		return nil, err
	}
	var prepared []Prepared
	var mounts []cdi.Mount
	for index, result := range claims.Results(claim) {
		options, err := n.options(claim, index, result, now)
		if err != nil {
			return nil, fmt.Errorf("request %s: %w", result.Request, err)
		}
		if err := n.offer(ctx, options, now); err != nil {
			return nil, fmt.Errorf("request %s: %w", result.Request, err)
		}
		mounts = append(mounts, cdi.Mount{
			HostPath:      filepath.Dir(options.Socket),
			ContainerPath: containerFolder(claim, index),
			Options:       []string{"bind", "ro", "nosuid", "nodev", "noexec"},
		})
		prepared = append(prepared, Prepared{Result: result, CDIDevice: cdi.Name(claim.UID, index)})
	}
	if err := n.CDI.Write(claim.UID, mounts); err != nil {
		return nil, err
	}
	n.after("CDI file")
	return prepared, nil
}

// offer creates a function on the server, unless the server has it already.
func (n *Node) offer(ctx context.Context, options server.Options, now state) error {
	if err := n.makeFolder(filepath.Dir(options.Socket)); err != nil {
		return err
	}
	n.after("folder")
	if function, there := now.functions[options.ID]; there {
		if function.State.Failed != "" {
			return fmt.Errorf("its function cannot be offered: %s", function.State.Failed)
		}
		if function.Socket != options.Socket {
			return fmt.Errorf("its function has the socket %s: remove it with `nvme-mpt remove %s`", function.Socket, options.ID)
		}
		return nil
	}
	err := n.Server.Add(ctx, options)
	if err != nil {
		// Data of claims that no longer exist may occupy the space, so this data is released before the second attempt.
		collected, _, collectError := n.collect(ctx, false)
		if collectError != nil || len(collected) == 0 {
			return errors.Join(err, collectError)
		}
		err = n.Server.Add(ctx, options)
	}
	if err != nil {
		return err
	}
	n.after("function")
	return nil
}

// makeFolder creates the folder of a socket, owned by the server's user.
func (n *Node) makeFolder(path string) error {
	user, err := n.Server.User()
	if err != nil {
		return err
	}
	root, err := folder.Make(n.Folder)
	if err != nil {
		return fmt.Errorf("the folder of the socket cannot be made: mount %s into the plugin: %w", n.Folder, err)
	}
	defer func() { _ = root.Close() }()
	below, err := filepath.Rel(n.Folder, path)
	if err != nil {
		return err
	}
	for _, name := range strings.Split(below, "/") {
		sub, err := folder.Sub(root, name)
		if err != nil {
			return fmt.Errorf("the folder of the socket cannot be made in %s: %w", n.Folder, err)
		}
		_ = root.Close()
		root = sub
	}
	if !user.IsOther() {
		return nil
	}
	if err := folder.Give(root, user.UID, user.GID); err != nil {
		return fmt.Errorf("the folder of the socket cannot be given to the server's user: let the plugin have CAP_CHOWN: %w", err)
	}
	return nil
}

// options returns the options of the function for an allocation result.
func (n *Node) options(claim *resourceapi.ResourceClaim, index int, result resourceapi.DeviceRequestAllocationResult, now state) (server.Options, error) {
	var none server.Options
	if result.Pool != n.Name {
		return none, fmt.Errorf("device %s belongs to pool %s, and this is node %s: the claim was allocated for another node", result.Device, result.Pool, n.Name)
	}
	function, err := parameters.Of(claim, result.Request)
	if err != nil {
		return none, err
	}
	weightMax := max(n.WeightMax, function.ClassWeight)
	if n.WeightMax == 0 {
		weightMax = max(DefaultWeight, function.ClassWeight)
	}
	if function.Weight > weightMax {
		return none, fmt.Errorf("weight %d: a claim may have up to %d: ask for less, or for a larger -weight-max of the plugin", function.Weight, weightMax)
	}
	var capacity *server.DriveCapacity
	for i := range now.capacities {
		if devices.NameOf(now.capacities[i]) == result.Device {
			capacity = &now.capacities[i]
		}
	}
	if capacity == nil {
		return none, fmt.Errorf("the server has no drive for device %s: give it to `nvme-mpt serve` with --drive", result.Device)
	}
	id := names.Lease(claim.UID, index)
	if other, found := now.has(id); found && devices.NameOf(other) != result.Device {
		return none, fmt.Errorf("its data is on drive %s, device %s, and it was allocated on %s, device %s: delete the claim to give the data up",
			other.Drive, devices.NameOf(other), capacity.Drive, result.Device)
	}
	// Without a namespace, the server would take the first one with enough space.
	var namespace int64
	if devices.IsPhysical(capacity.Drive) {
		namespace = capacity.NSID
	}
	amount := func(name resourceapi.QualifiedName) int64 {
		quantity := result.ConsumedCapacity[name]
		return quantity.Value()
	}
	size := amount(names.Size)
	if size <= 0 {
		return none, fmt.Errorf("the scheduler granted no part of device %s: enable the feature gate DRAConsumableCapacity in all components of the cluster", result.Device)
	}
	return server.Options{
		ID:        id,
		Socket:    filepath.Join(n.claimFolder(claim.UID), strconv.Itoa(index), SocketName),
		Drive:     capacity.Drive,
		Namespace: namespace,
		Size:      size,
		Unit:      n.Server.Unit,
		Reserve:   amount(names.Queues),
		Queues:    atLeast(function.Queues, amount(names.Queues)),
		IOPS:      amount(names.IOPS),
		Bandwidth: amount(names.Bandwidth),
		Weight:    function.Weight,
		Owner:     function.Owner,
		Mode:      function.Mode,
	}, nil
}

// serverQueues is the server's default maximum of I/O queue pairs per guest.
const serverQueues = 16

// atLeast returns the maximum of queue pairs for a guest, so that it can use all reserved ones; 0 if the server's default
// suffices.
func atLeast(asked, reserved int64) int64 {
	if asked == 0 && reserved <= serverQueues {
		return 0
	}
	return max(asked, reserved)
}

func (n *Node) claimFolder(claim types.UID) string {
	return filepath.Join(n.Folder, string(claim))
}

// containerFolder returns the folder of a socket in a container. It is named after the pod's names of the claim and of
// the request.
func containerFolder(claim *resourceapi.ResourceClaim, index int) string {
	name := claim.Name
	if podName := claim.Annotations[podClaimAnnotation]; podName != "" {
		name = podName
	}
	results := claims.Results(claim)
	request := parameters.Base(results[index].Request)
	before := 0
	for _, result := range results[:index] {
		if parameters.Base(result.Request) == request {
			before++
		}
	}
	folder := request
	if before > 0 {
		// The request has a count, so its results are numbered.
		folder = fmt.Sprintf("%s.%d", request, before)
	}
	return filepath.Join(containerRoot, name, folder)
}

// Unprepare removes the functions of a claim. Their data stays if the claim keeps it.
func (n *Node) Unprepare(ctx context.Context, uid types.UID, namespace, name string) error {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if err := n.unprepare(ctx, uid, namespace, name); err != nil {
		return fmt.Errorf("claim %s/%s (%s): %w", namespace, name, uid, err)
	}
	return nil
}

func (n *Node) unprepare(ctx context.Context, uid types.UID, namespace, name string) error {
	now, err := n.state(ctx)
	if err != nil {
		return err
	}
	var ids []string
	for _, id := range sets.List(now.ids()) {
		if of, _ := names.Claim(id); of == uid {
			ids = append(ids, id)
		}
	}
	for _, id := range ids {
		if _, there := now.functions[id]; !there {
			continue
		}
		// The containers of the claim have ended. So a VMM that is still connected has outlived its pod, and is disconnected by
		// force.
		if err := n.Server.Remove(ctx, id, true); err != nil {
			return err
		}
		n.after("function removed")
	}
	if len(ids) > 0 {
		kept, err := n.kept(ctx, uid, namespace, name, ids)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if kept.Has(id) {
				continue
			}
			if err := n.release(ctx, id); err != nil {
				return err
			}
		}
	}
	return n.forget(uid)
}

// release releases the lease and the data of an id, if it has any.
func (n *Node) release(ctx context.Context, id string) error {
	capacities, err := n.Server.Capacities(ctx)
	if err != nil {
		return err
	}
	if _, found := (state{capacities: capacities}).has(id); !found {
		return nil
	}
	if err := n.Server.Release(ctx, id); err != nil {
		return err
	}
	n.after("data released")
	return nil
}

// forget removes the files and folders of a claim.
func (n *Node) forget(uid types.UID) error {
	if err := n.CDI.Remove(uid); err != nil {
		return err
	}
	n.after("CDI file removed")
	root, err := folder.Open(n.Folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("the folder of sockets cannot be opened: %w", err)
	}
	defer func() { _ = root.Close() }()
	if err := root.RemoveAll(string(uid)); err != nil {
		return fmt.Errorf("the folder of the sockets cannot be removed: %w", err)
	}
	n.after("folder removed")
	return nil
}

// kept returns those ids of a claim whose data stays. It returns none if the claim no longer exists or is being deleted.
func (n *Node) kept(ctx context.Context, uid types.UID, namespace, name string, ids []string) (sets.Set[string], error) {
	kept := sets.New[string]()
	claim, err := n.Cluster.Get(ctx, namespace, name)
	if err != nil {
		return nil, err
	}
	if claim == nil || claim.UID != uid || claim.DeletionTimestamp != nil {
		return kept, nil
	}
	// The parameters of a claim's request decide about the data of the id. A claim without an allocation has no requests here,
	// and the same answer for all ids.
	requests := make(map[string]string, len(ids))
	for index, result := range claims.Results(claim) {
		requests[names.Lease(uid, index)] = result.Request
	}
	for _, id := range ids {
		function, err := parameters.Of(claim, requests[id])
		if err != nil {
			return nil, err
		}
		if function.DataPolicy(claim) == parameters.Keep {
			kept.Insert(id)
		}
	}
	return kept, nil
}

// Collected is the result of Collect.
type Collected struct {
	// Released are the leases that were released.
	Released []string
	// Unallocated are leases with data whose claims are not allocated.
	Unallocated sets.Set[string]
}

// Collect releases the leases and files of claims that no longer exist in the API server. Unless all is set, it checks only
// leases without a function, and does not ask the API server if there are none.
func (n *Node) Collect(ctx context.Context, all bool) (Collected, error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	released, unallocated, err := n.collect(ctx, all)
	return Collected{released, unallocated}, err
}

func (n *Node) collect(ctx context.Context, all bool) (released []string, unallocated sets.Set[string], err error) {
	unallocated = sets.New[string]()
	// The server's state is read before the claims. A claim is created before its lease, so the claims of all these leases are
	// found.
	now, err := n.state(ctx)
	if err != nil {
		return nil, unallocated, err
	}
	suspects := sets.New[types.UID]()
	running := sets.New[types.UID]()
	for id := range now.ids() {
		uid, _ := names.Claim(id)
		if _, there := now.functions[id]; there {
			running.Insert(uid)
		}
		suspects.Insert(uid)
	}
	files, err := n.files()
	if err != nil {
		return nil, unallocated, err
	}
	suspects = suspects.Union(files)
	if !all {
		suspects = suspects.Difference(running)
	}
	if suspects.Len() == 0 {
		return nil, unallocated, nil
	}
	list, err := n.Cluster.List(ctx)
	if err != nil {
		return nil, unallocated, err
	}
	known := make(map[types.UID]*resourceapi.ResourceClaim, len(list))
	for i := range list {
		known[list[i].UID] = &list[i]
	}
	for _, id := range sets.List(now.ids()) {
		uid, _ := names.Claim(id)
		claim := known[uid]
		if claim != nil && claim.Status.Allocation == nil {
			unallocated.Insert(id)
		}
		if claim != nil || !suspects.Has(uid) {
			continue
		}
		if _, there := now.functions[id]; there {
			// The function is removed without force, because a connected VMM belongs to a pod that is still running.
			if err := n.Server.Remove(ctx, id, false); err != nil {
				return released, unallocated, err
			}
			n.after("function removed")
		}
		if err := n.release(ctx, id); err != nil {
			return released, unallocated, err
		}
		released = append(released, id)
	}
	for _, uid := range sets.List(files) {
		if known[uid] == nil && suspects.Has(uid) {
			if err := n.forget(uid); err != nil {
				return released, unallocated, err
			}
		}
	}
	return released, unallocated, nil
}

// files returns the claims that have a CDI file or a folder.
func (n *Node) files() (sets.Set[types.UID], error) {
	found, err := n.CDI.Claims()
	if err != nil {
		return nil, err
	}
	files := sets.New(found...)
	root, err := folder.Open(n.Folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the folder of sockets cannot be opened: %w", err)
	}
	if err == nil {
		defer func() { _ = root.Close() }()
		entries, err := fs.ReadDir(root.FS(), ".")
		if err != nil {
			return nil, fmt.Errorf("the folder of sockets cannot be read: %w", err)
		}
		for _, entry := range entries {
			files.Insert(types.UID(entry.Name()))
		}
	}
	// Files of other programs are skipped.
	for uid := range files {
		if _, isClaim := names.Claim(names.Lease(uid, 0)); !isClaim {
			files.Delete(uid)
		}
	}
	return files, nil
}
