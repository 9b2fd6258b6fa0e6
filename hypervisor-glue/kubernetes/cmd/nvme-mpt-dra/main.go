// Command nvme-mpt-dra hands out parts of NVMe drives in a Kubernetes cluster.
//
//	nvme-mpt-dra node   on each node with drives: the DRA driver
//	nvme-mpt-dra hold   once in a cluster: keeps claims allocated whose data outlives their pods
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"nvme-mpt.internal/kubernetes/internal/cdi"
	"nvme-mpt.internal/kubernetes/internal/claims"
	"nvme-mpt.internal/kubernetes/internal/devices"
	"nvme-mpt.internal/kubernetes/internal/driver"
	"nvme-mpt.internal/kubernetes/internal/node"
	"nvme-mpt.internal/kubernetes/internal/server"
)

const usage = "use `nvme-mpt-dra node` on each node with drives, and `nvme-mpt-dra hold` once in the cluster; -help after either has the options"

// holdPause is the delay before the next watch of claims after a watch has ended.
const holdPause = 5 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "nvme-mpt-dra: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string) error {
	if len(arguments) == 0 {
		return errors.New(usage)
	}
	command, arguments := arguments[0], arguments[1:]
	switch command {
	case "node":
		return runNode(ctx, arguments)
	case "hold":
		return runHold(ctx, arguments)
	default:
		return fmt.Errorf("there is no command %q: %s", command, usage)
	}
}

// client returns a client of the API server, with the pod's account or by the kubeconfig file.
func client(kubeconfig string) (kubernetes.Interface, error) {
	config, err := rest.InClusterConfig()
	if kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("the API server is not known: run in a pod, or give -kubeconfig: %w", err)
	}
	found, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("the API server cannot be used: %w", err)
	}
	return found, nil
}

// bytes is a command-line flag with a quantity, as in 6Gi.
type bytes int64

func (b *bytes) String() string {
	return resource.NewQuantity(int64(*b), resource.BinarySI).String()
}

func (b *bytes) Set(text string) error {
	quantity, err := resource.ParseQuantity(text)
	if err != nil {
		return fmt.Errorf("use a quantity, as in 6Gi: %w", err)
	}
	*b = bytes(quantity.Value())
	return nil
}

func runNode(ctx context.Context, arguments []string) error {
	var (
		flags      = flag.NewFlagSet("nvme-mpt-dra node", flag.ContinueOnError)
		name       = flags.String("node-name", os.Getenv("NODE_NAME"), "name of this node (environment variable NODE_NAME)")
		kubeconfig = flags.String("kubeconfig", "", "file that names the API server, for a plugin outside of a pod")
		kubelet    = flags.String("kubelet-dir", "/var/lib/kubelet", "directory of kubelet")
		binary     = flags.String("nvme-mpt", "nvme-mpt", "the nvme-mpt command")
		state      = flags.String("state-dir", "/var/lib/nvme-mpt", "state directory of `nvme-mpt serve`")
		control    = flags.String("control", "", "control socket of `nvme-mpt serve` (default: that of the state directory)")
		sockets    = flags.String("sockets-dir", "", "directory for sockets of claims, by the path that the server has for it (default: claims in the state directory)")
		cdiDir     = flags.String("cdi-dir", "/var/run/cdi", "directory of CDI files")
		interval   = flags.Duration("interval", 15*time.Second, "time between two looks at the server")
		timeout    = flags.Duration("change-timeout", 5*time.Minute, "longest time for a change; data of previous owners is erased within it")
		weightMax  = flags.Int64("weight-max", node.DefaultWeight, "largest weight that a claim may ask for; a DeviceClass may give more")
		rates      devices.Rates
		unit       bytes
	)
	flags.Var(&unit, "unit", "step of sizes, a power of two from 1Mi on (default: 1Gi)")
	flags.Int64Var(&rates.IOPS.Total, "iops", 0, "I/O commands per second that the claims of a drive share; 0 to leave them out")
	flags.Int64Var(&rates.IOPS.Default, "default-iops", 0, "those of a claim that asks for none; 0 for no limit")
	flags.Var((*bytes)(&rates.Bandwidth.Total), "bandwidth", "bytes per second that the claims of a drive share; 0 to leave them out")
	flags.Var((*bytes)(&rates.Bandwidth.Default), "default-bandwidth", "those of a claim that asks for none; 0 for no limit")
	if err := flags.Parse(arguments); err != nil {
		return helpIsNoError(err)
	}
	if *name == "" {
		return errors.New("the node has no name: give -node-name, or set NODE_NAME by the downward API")
	}
	if *sockets == "" {
		*sockets = filepath.Join(*state, "claims")
	}
	api, err := client(*kubeconfig)
	if err != nil {
		return err
	}
	return driver.New(driver.Options{
		Node: &node.Node{
			Name: *name,
			Server: &server.Server{
				Binary:   *binary,
				StateDir: *state,
				Control:  *control,
				Unit:     int64(unit),
				Question: 15 * time.Second,
				Change:   *timeout,
			},
			Cluster: claims.Cluster{Client: api},
			Folder:  *sockets,
			CDI:     cdi.Folder(*cdiDir),
			// If Prepare fails, kubelet repeats the request after ten seconds or more. So Prepare waits that long itself.
			HoldTimeout: 10 * time.Second,
			WeightMax:   *weightMax,
		},
		Client:     api,
		Rates:      rates,
		KubeletDir: *kubelet,
		Interval:   *interval,
	}).Run(ctx)
}

func runHold(ctx context.Context, arguments []string) error {
	flags := flag.NewFlagSet("nvme-mpt-dra hold", flag.ContinueOnError)
	kubeconfig := flags.String("kubeconfig", "", "file that names the API server, for a process outside of a pod")
	if err := flags.Parse(arguments); err != nil {
		return helpIsNoError(err)
	}
	api, err := client(*kubeconfig)
	if err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	report := func(err error) { logger.Error(err, "A claim is not held") }
	for ctx.Err() == nil {
		if err := (claims.Cluster{Client: api}).Watch(ctx, report); err != nil {
			logger.Error(err, "The claims are watched again in a moment")
		}
		select {
		case <-ctx.Done():
		case <-time.After(holdPause):
		}
	}
	return nil
}

func helpIsNoError(err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	return err
}
