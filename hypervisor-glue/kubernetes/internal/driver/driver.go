// Package driver is the DRA driver of one node: it publishes the node's drives and creates functions for claims.
package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"nvme-mpt.internal/kubernetes/internal/devices"
	"nvme-mpt.internal/kubernetes/internal/names"
	"nvme-mpt.internal/kubernetes/internal/node"
)

const (
	// sliceLength is the maximum number of devices in a slice with taints.
	sliceLength = 64
	// fullCollections is the number of reads of the server's state after which Collect checks leases with a function as well.
	fullCollections = 40
)

// Options configure a driver.
type Options struct {
	Node   *node.Node
	Client kubernetes.Interface
	Rates  devices.Rates
	// KubeletDir is kubelet's folder, which contains plugins and plugins_registry.
	KubeletDir string
	// Interval is the time between two reads of the server's state.
	Interval time.Duration
}

// Driver is a DRA driver.
type Driver struct {
	options Options
	// last has the devices that were published last, for the time in which the server does not answer.
	last []resourceapi.Device
}

// New returns a driver; Run starts it.
func New(options Options) *Driver {
	return &Driver{options: options}
}

// Run serves kubelet until the context ends.
func (d *Driver) Run(ctx context.Context) error {
	data := filepath.Join(d.options.KubeletDir, "plugins", names.Driver)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return fmt.Errorf("the plugin's folder cannot be made: mount %s into the plugin: %w", filepath.Dir(data), err)
	}
	helper, err := kubeletplugin.Start(ctx, plugin{d.options.Node},
		kubeletplugin.KubeClient(d.options.Client),
		kubeletplugin.NodeName(d.options.Node.Name),
		kubeletplugin.DriverName(names.Driver),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(d.options.KubeletDir, "plugins_registry")),
	)
	if err != nil {
		return fmt.Errorf("kubelet cannot be served: %w", err)
	}
	defer helper.Stop()
	ticker := time.NewTicker(d.options.Interval)
	defer ticker.Stop()
	for round := 0; ; round++ {
		resources := d.Resources(ctx, round%fullCollections == 0)
		if err := helper.PublishResources(ctx, resources); err != nil {
			return fmt.Errorf("the drives cannot be published: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Resources releases leases whose claims are gone, and returns the node's devices. Drives whose server does not answer
// are tainted.
func (d *Driver) Resources(ctx context.Context, all bool) resourceslice.DriverResources {
	logger := klog.FromContext(ctx)
	collected, err := d.options.Node.Collect(ctx, all)
	for _, id := range collected.Released {
		logger.Info("Released a lease whose claim is gone", "lease", id)
	}
	if err != nil {
		logger.Error(err, "Leases of claims that are gone were not all released")
	}
	facts, err := d.facts(ctx, collected.Unallocated)
	shown := d.last
	if err != nil {
		logger.Error(err, "The server does not report its drives")
		shown = devices.Unreachable(d.last)
	} else {
		d.last = devices.Of(facts, d.options.Rates)
		shown = d.last
	}
	var pool resourceslice.Pool
	for len(shown) > sliceLength {
		pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: shown[:sliceLength]})
		shown = shown[sliceLength:]
	}
	// This slice is needed even without devices, because a pool must have at least one slice.
	pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: shown})
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.options.Node.Name: pool}}
}

func (d *Driver) facts(ctx context.Context, unallocated sets.Set[string]) (devices.Facts, error) {
	server := d.options.Node.Server
	drives, err1 := server.Drives(ctx)
	capacities, err2 := server.Capacities(ctx)
	leases, err3 := server.Leases(ctx)
	host, err4 := server.HostDrives(ctx)
	facts := devices.Facts{
		Drives:     drives,
		Capacities: capacities,
		Leases:     leases,
		HostDrives: host,
		IsCounted: func(lease string) bool {
			_, isClaim := names.Claim(lease)
			return isClaim && !unallocated.Has(lease)
		},
	}
	return facts, errors.Join(err1, err2, err3, err4)
}

// plugin answers kubelet's requests.
type plugin struct {
	node *node.Node
}

var _ kubeletplugin.DRAPlugin = plugin{}

func (p plugin) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		prepared, err := p.node.Prepare(ctx, claim)
		result := kubeletplugin.PrepareResult{Err: err}
		for _, function := range prepared {
			result.Devices = append(result.Devices, kubeletplugin.Device{
				Requests:     []string{function.Result.Request},
				PoolName:     function.Result.Pool,
				DeviceName:   function.Result.Device,
				ShareID:      function.Result.ShareID,
				CDIDeviceIDs: []string{function.CDIDevice},
			})
		}
		results[claim.UID] = result
	}
	return results, nil
}

func (p plugin) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		results[claim.UID] = p.node.Unprepare(ctx, claim.UID, claim.Namespace, claim.Name)
	}
	return results, nil
}

// HandleError logs errors of the helper's background work, which it retries. Dropped fields of a slice are the exception.
func (p plugin) HandleError(ctx context.Context, err error, message string) {
	logger := klog.FromContext(ctx)
	var dropped *resourceslice.DroppedFieldsError
	if errors.As(err, &dropped) {
		logger.Error(err, "The API server leaves out what drives need: enable the feature gates DRAConsumableCapacity and DRADeviceTaints",
			"fields", dropped.DisabledFeatures())
		return
	}
	logger.Error(err, message)
}
