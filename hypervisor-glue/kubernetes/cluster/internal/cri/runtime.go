// Package cri is a container runtime without images, which kubelet drives by the Container Runtime Interface.
//
// Containers of known images are processes. All others are entries in a table, which run until kubelet stops them. The
// runtime looks up CDI devices like other runtimes, and connects to the sockets in their mounts.
package cri

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"nvme-mpt.internal/kubernetes/cluster/internal/machine"
)

// Labels by which kubelet names the pod of a container.
const (
	podLabel       = "io.kubernetes.pod.name"
	namespaceLabel = "io.kubernetes.pod.namespace"
)

// Options configure a runtime.
type Options struct {
	// CDI is the folder of the CDI files.
	CDI string
	// Socket is the name of the socket in each folder that a CDI device mounts.
	Socket string
	// Image is the folder with the programs of all images.
	Image string
	// Programs maps images whose containers are processes to their programs.
	Programs map[string]string
	// Created is called after each creation of a container with CDI devices, with the number of such containers so far.
	Created func(number int)
}

// Container describes a container that kubelet has created.
type Container struct {
	ID, Namespace, Pod string
	IsRunning          bool
	// Mounts are the mounts of its CDI devices.
	Mounts []Mount
}

type sandbox struct {
	status *v1.PodSandboxStatus
}

type container struct {
	status  *v1.ContainerStatus
	sandbox string
	mounts  []Mount
	// runs describes the process; nil for a container that is only a table entry.
	runs    *machine.Container
	process *machine.Process
}

// Runtime is a container runtime.
type Runtime struct {
	v1.UnimplementedRuntimeServiceServer
	v1.UnimplementedImageServiceServer
	options Options

	mutex      sync.Mutex
	sandboxes  map[string]*sandbox
	containers map[string]*container
	images     map[string]*v1.Image
	made       int
	withCDI    int
	complaints []string
}

// Start serves kubelet on a socket until the process ends.
func Start(socket string, options Options) (*Runtime, error) {
	r := &Runtime{
		options:    options,
		sandboxes:  map[string]*sandbox{},
		containers: map[string]*container{},
		images:     map[string]*v1.Image{},
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("the runtime cannot listen: %w", err)
	}
	server := grpc.NewServer()
	v1.RegisterRuntimeServiceServer(server, r)
	v1.RegisterImageServiceServer(server, r)
	go func() { _ = server.Serve(listener) }()
	return r, nil
}

// Containers returns all containers of a namespace.
func (r *Runtime) Containers(namespace string) []Container {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var found []Container
	for id, c := range r.containers {
		if c.status.Labels[namespaceLabel] == namespace {
			found = append(found, Container{
				ID: id, Namespace: namespace, Pod: c.status.Labels[podLabel],
				IsRunning: c.status.State == v1.ContainerState_CONTAINER_RUNNING,
				Mounts:    c.mounts,
			})
		}
	}
	return found
}

// Complaints returns the problems found with CDI devices.
func (r *Runtime) Complaints() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return slices.Clone(r.complaints)
}

// KillProcesses kills the processes of an image, and returns their number.
func (r *Runtime) KillProcesses(image string) int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	count := 0
	for _, c := range r.containers {
		if c.process != nil && c.status.State == v1.ContainerState_CONTAINER_RUNNING && c.status.Image.Image == image {
			c.process.Signal(syscall.SIGKILL)
			count++
		}
	}
	return count
}

// Logs returns the last lines of the logs of all processes.
func (r *Runtime) Logs() string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	text := ""
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		if c := r.containers[id]; c.process != nil {
			text += fmt.Sprintf("--- %s %s\n%s\n", id, c.status.Labels[podLabel], c.process.Tail())
		}
	}
	return text
}

// Version answers kubelet.
func (r *Runtime) Version(context.Context, *v1.VersionRequest) (*v1.VersionResponse, error) {
	return &v1.VersionResponse{Version: "0.1.0", RuntimeName: "table", RuntimeVersion: "0.1.0", RuntimeApiVersion: "v1"}, nil
}

// Status answers kubelet.
func (r *Runtime) Status(context.Context, *v1.StatusRequest) (*v1.StatusResponse, error) {
	return &v1.StatusResponse{Status: &v1.RuntimeStatus{Conditions: []*v1.RuntimeCondition{
		{Type: v1.RuntimeReady, Status: true}, {Type: v1.NetworkReady, Status: true},
	}}}, nil
}

// RuntimeConfig answers kubelet.
func (r *Runtime) RuntimeConfig(context.Context, *v1.RuntimeConfigRequest) (*v1.RuntimeConfigResponse, error) {
	return &v1.RuntimeConfigResponse{Linux: &v1.LinuxRuntimeConfiguration{CgroupDriver: v1.CgroupDriver_CGROUPFS}}, nil
}

// UpdateRuntimeConfig ignores the pods' network configuration, as there is no network.
func (r *Runtime) UpdateRuntimeConfig(context.Context, *v1.UpdateRuntimeConfigRequest) (*v1.UpdateRuntimeConfigResponse, error) {
	return &v1.UpdateRuntimeConfigResponse{}, nil
}

// id returns a new name for an object of this kind.
func (r *Runtime) id(kind string) string {
	r.made++
	return fmt.Sprintf("%s-%d", kind, r.made)
}

// RunPodSandbox creates a sandbox.
func (r *Runtime) RunPodSandbox(_ context.Context, request *v1.RunPodSandboxRequest) (*v1.RunPodSandboxResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	id, config := r.id("sandbox"), request.Config
	r.sandboxes[id] = &sandbox{&v1.PodSandboxStatus{
		Id:        id,
		Metadata:  config.Metadata,
		State:     v1.PodSandboxState_SANDBOX_READY,
		CreatedAt: time.Now().UnixNano(),
		Network:   &v1.PodSandboxNetworkStatus{Ip: "10.0.0.1"},
		// Required: kubelet recreates a sandbox if its namespaces differ from the pod's.
		Linux:          &v1.LinuxPodSandboxStatus{Namespaces: &v1.Namespace{Options: config.GetLinux().GetSecurityContext().GetNamespaceOptions()}},
		Labels:         config.Labels,
		Annotations:    config.Annotations,
		RuntimeHandler: request.RuntimeHandler,
	}}
	return &v1.RunPodSandboxResponse{PodSandboxId: id}, nil
}

// StopPodSandbox stops a sandbox and its containers. A missing sandbox counts as stopped.
func (r *Runtime) StopPodSandbox(_ context.Context, request *v1.StopPodSandboxRequest) (*v1.StopPodSandboxResponse, error) {
	r.stopAll(request.PodSandboxId)
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if found := r.sandboxes[request.PodSandboxId]; found != nil {
		found.status.State = v1.PodSandboxState_SANDBOX_NOTREADY
	}
	return &v1.StopPodSandboxResponse{}, nil
}

// RemovePodSandbox removes a sandbox and its containers. A missing sandbox counts as removed.
func (r *Runtime) RemovePodSandbox(_ context.Context, request *v1.RemovePodSandboxRequest) (*v1.RemovePodSandboxResponse, error) {
	r.stopAll(request.PodSandboxId)
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.sandboxes, request.PodSandboxId)
	maps.DeleteFunc(r.containers, func(_ string, c *container) bool { return c.sandbox == request.PodSandboxId })
	return &v1.RemovePodSandboxResponse{}, nil
}

func (r *Runtime) stopAll(sandbox string) {
	r.mutex.Lock()
	var ids []string
	for id, c := range r.containers {
		if c.sandbox == sandbox {
			ids = append(ids, id)
		}
	}
	r.mutex.Unlock()
	for _, id := range ids {
		r.stop(id, 0)
	}
}

// PodSandboxStatus answers kubelet.
func (r *Runtime) PodSandboxStatus(_ context.Context, request *v1.PodSandboxStatusRequest) (*v1.PodSandboxStatusResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	found := r.sandboxes[request.PodSandboxId]
	if found == nil {
		return nil, status.Errorf(codes.NotFound, "there is no sandbox %s", request.PodSandboxId)
	}
	return &v1.PodSandboxStatusResponse{Status: copyOf(found.status)}, nil
}

// ListPodSandbox answers kubelet.
func (r *Runtime) ListPodSandbox(_ context.Context, request *v1.ListPodSandboxRequest) (*v1.ListPodSandboxResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	answer, filter := &v1.ListPodSandboxResponse{}, request.GetFilter()
	for id, s := range r.sandboxes {
		if (filter.GetId() != "" && filter.GetId() != id) || !isSelected(filter.GetLabelSelector(), s.status.Labels) ||
			(filter.GetState() != nil && filter.GetState().State != s.status.State) {
			continue
		}
		now := copyOf(s.status)
		answer.Items = append(answer.Items, &v1.PodSandbox{
			Id: id, Metadata: now.Metadata, State: now.State, CreatedAt: now.CreatedAt,
			Labels: now.Labels, Annotations: now.Annotations, RuntimeHandler: now.RuntimeHandler,
		})
	}
	return answer, nil
}

// CreateContainer creates a container with the mounts of its CDI devices.
func (r *Runtime) CreateContainer(_ context.Context, request *v1.CreateContainerRequest) (*v1.CreateContainerResponse, error) {
	config := request.Config
	var injected []Mount
	for _, device := range config.CDIDevices {
		found, err := mounts(r.options.CDI, device.Name)
		for _, mount := range found {
			if err == nil {
				err = reach(mount, r.options.Socket)
			}
		}
		if err != nil {
			r.mutex.Lock()
			r.complaints = append(r.complaints, fmt.Sprintf("%s: %v", config.Labels[podLabel], err))
			r.mutex.Unlock()
			return nil, status.Errorf(codes.Internal, "CDI device %s: %v", device.Name, err)
		}
		injected = append(injected, found...)
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	parent := r.sandboxes[request.PodSandboxId]
	if parent == nil {
		return nil, status.Errorf(codes.NotFound, "there is no sandbox %s", request.PodSandboxId)
	}
	id := r.id("container")
	made := &container{
		sandbox: request.PodSandboxId,
		mounts:  injected,
		status: &v1.ContainerStatus{
			Id: id, Metadata: config.Metadata, Image: config.Image, ImageRef: config.Image.Image, ImageId: config.Image.Image,
			CreatedAt: time.Now().UnixNano(), State: v1.ContainerState_CONTAINER_CREATED,
			Labels: config.Labels, Annotations: config.Annotations, Mounts: config.Mounts,
			LogPath: filepath.Join(request.SandboxConfig.GetLogDirectory(), config.LogPath),
		},
	}
	if program, isProcess := r.options.Programs[config.Image.Image]; isProcess {
		runs, err := r.process(id, program, config)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "%v", err)
		}
		made.runs = runs
	}
	// kubelet expects the file, and rotates it once it is large.
	if err := os.WriteFile(made.status.LogPath, nil, 0o644); err != nil {
		return nil, status.Errorf(codes.Internal, "%v", err)
	}
	r.containers[id] = made
	if len(injected) > 0 {
		r.withCDI++
		if r.options.Created != nil {
			go r.options.Created(r.withCDI)
		}
	}
	return &v1.CreateContainerResponse{ContainerId: id}, nil
}

// process describes the process of a container. It refuses options that this runtime does not support.
func (r *Runtime) process(id, program string, config *v1.ContainerConfig) (*machine.Container, error) {
	security := config.GetLinux().GetSecurityContext()
	if security.GetPrivileged() || !slices.Contains(security.GetCapabilities().GetDropCapabilities(), "ALL") {
		return nil, fmt.Errorf("container %s keeps capabilities: drop ALL in its manifest", config.Metadata.Name)
	}
	runs := &machine.Container{
		Root:            filepath.Join("/var/lib/containers", id),
		Image:           r.options.Image,
		Arguments:       append([]string{program}, config.Args...),
		User:            int(security.GetRunAsUser().GetValue()),
		Group:           int(security.GetRunAsGroup().GetValue()),
		Capabilities:    security.GetCapabilities().GetAddCapabilities(),
		NoNewPrivileges: security.GetNoNewPrivs(),
		ReadOnlyRoot:    security.GetReadonlyRootfs(),
	}
	for _, group := range security.GetSupplementalGroups() {
		runs.Groups = append(runs.Groups, int(group))
	}
	for _, variable := range config.Envs {
		runs.Environment = append(runs.Environment, variable.Key+"="+string(variable.Value))
	}
	for _, mount := range config.Mounts {
		runs.Mounts = append(runs.Mounts, machine.Mount{Source: mount.HostPath, Target: mount.ContainerPath, ReadOnly: mount.Readonly})
	}
	return runs, os.MkdirAll(runs.Root, 0o755)
}

// StartContainer starts a container.
func (r *Runtime) StartContainer(_ context.Context, request *v1.StartContainerRequest) (*v1.StartContainerResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	found := r.containers[request.ContainerId]
	if found == nil {
		return nil, status.Errorf(codes.NotFound, "there is no container %s", request.ContainerId)
	}
	if found.runs != nil {
		process, err := machine.StartContainer(request.ContainerId, *found.runs)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "%v", err)
		}
		found.process = process
		go func() {
			<-process.Ended()
			r.mutex.Lock()
			defer r.mutex.Unlock()
			found.end(int32(process.ExitCode()))
		}()
	}
	found.status.State, found.status.StartedAt = v1.ContainerState_CONTAINER_RUNNING, time.Now().UnixNano()
	return &v1.StartContainerResponse{}, nil
}

func (c *container) end(code int32) {
	if c.status.State == v1.ContainerState_CONTAINER_EXITED {
		return
	}
	c.status.State, c.status.FinishedAt, c.status.ExitCode = v1.ContainerState_CONTAINER_EXITED, time.Now().UnixNano(), code
	c.status.Reason = "Completed"
	if code != 0 {
		c.status.Reason = "Error"
	}
}

// stop ends a container. Its process gets SIGTERM, and SIGKILL after the grace period.
func (r *Runtime) stop(id string, grace time.Duration) {
	r.mutex.Lock()
	found := r.containers[id]
	var process *machine.Process
	if found != nil {
		process = found.process
	}
	r.mutex.Unlock()
	if found == nil {
		return
	}
	code := int32(0)
	if process != nil {
		process.Signal(syscall.SIGTERM)
		select {
		case <-process.Ended():
		case <-time.After(grace):
			process.Kill()
		}
		code = int32(process.ExitCode())
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	found.end(code)
}

// StopContainer stops a container. A missing container counts as stopped.
func (r *Runtime) StopContainer(_ context.Context, request *v1.StopContainerRequest) (*v1.StopContainerResponse, error) {
	r.stop(request.ContainerId, time.Duration(request.Timeout)*time.Second)
	return &v1.StopContainerResponse{}, nil
}

// RemoveContainer removes a container. A missing container counts as removed.
func (r *Runtime) RemoveContainer(_ context.Context, request *v1.RemoveContainerRequest) (*v1.RemoveContainerResponse, error) {
	r.stop(request.ContainerId, 0)
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.containers, request.ContainerId)
	return &v1.RemoveContainerResponse{}, nil
}

// ListContainers answers kubelet.
func (r *Runtime) ListContainers(_ context.Context, request *v1.ListContainersRequest) (*v1.ListContainersResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	answer, filter := &v1.ListContainersResponse{}, request.GetFilter()
	for id, c := range r.containers {
		if (filter.GetId() != "" && filter.GetId() != id) || (filter.GetPodSandboxId() != "" && filter.GetPodSandboxId() != c.sandbox) ||
			!isSelected(filter.GetLabelSelector(), c.status.Labels) ||
			(filter.GetState() != nil && filter.GetState().State != c.status.State) {
			continue
		}
		now := copyOf(c.status)
		answer.Containers = append(answer.Containers, &v1.Container{
			Id: id, PodSandboxId: c.sandbox, Metadata: now.Metadata, Image: now.Image, ImageRef: now.ImageRef, ImageId: now.ImageId,
			State: now.State, CreatedAt: now.CreatedAt, Labels: now.Labels, Annotations: now.Annotations,
		})
	}
	return answer, nil
}

// ContainerStatus answers kubelet.
func (r *Runtime) ContainerStatus(_ context.Context, request *v1.ContainerStatusRequest) (*v1.ContainerStatusResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	found := r.containers[request.ContainerId]
	if found == nil {
		return nil, status.Errorf(codes.NotFound, "there is no container %s", request.ContainerId)
	}
	return &v1.ContainerStatusResponse{Status: copyOf(found.status)}, nil
}

// UpdateContainerResources ignores limits, as none are enforced.
func (r *Runtime) UpdateContainerResources(context.Context, *v1.UpdateContainerResourcesRequest) (*v1.UpdateContainerResourcesResponse, error) {
	return &v1.UpdateContainerResourcesResponse{}, nil
}

// ListContainerStats answers kubelet without statistics.
func (r *Runtime) ListContainerStats(context.Context, *v1.ListContainerStatsRequest) (*v1.ListContainerStatsResponse, error) {
	return &v1.ListContainerStatsResponse{}, nil
}

// ListPodSandboxStats answers kubelet without statistics.
func (r *Runtime) ListPodSandboxStats(context.Context, *v1.ListPodSandboxStatsRequest) (*v1.ListPodSandboxStatsResponse, error) {
	return &v1.ListPodSandboxStatsResponse{}, nil
}

// ListImages answers kubelet.
func (r *Runtime) ListImages(_ context.Context, request *v1.ListImagesRequest) (*v1.ListImagesResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	answer, wanted := &v1.ListImagesResponse{}, request.GetFilter().GetImage().GetImage()
	for name, image := range r.images {
		if wanted == "" || wanted == name {
			answer.Images = append(answer.Images, image)
		}
	}
	return answer, nil
}

// ImageStatus answers kubelet.
func (r *Runtime) ImageStatus(_ context.Context, request *v1.ImageStatusRequest) (*v1.ImageStatusResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return &v1.ImageStatusResponse{Image: r.images[request.Image.Image]}, nil
}

// PullImage succeeds for every image.
func (r *Runtime) PullImage(_ context.Context, request *v1.PullImageRequest) (*v1.PullImageResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	name := request.Image.Image
	r.images[name] = &v1.Image{Id: name, RepoTags: []string{name}, Size: 1, Spec: &v1.ImageSpec{Image: name}}
	return &v1.PullImageResponse{ImageRef: name}, nil
}

// RemoveImage forgets an image.
func (r *Runtime) RemoveImage(_ context.Context, request *v1.RemoveImageRequest) (*v1.RemoveImageResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.images, request.Image.Image)
	return &v1.RemoveImageResponse{}, nil
}

// ImageFsInfo answers kubelet.
func (r *Runtime) ImageFsInfo(context.Context, *v1.ImageFsInfoRequest) (*v1.ImageFsInfoResponse, error) {
	usage := []*v1.FilesystemUsage{{
		Timestamp: time.Now().UnixNano(), FsId: &v1.FilesystemIdentifier{Mountpoint: "/var"},
		UsedBytes: &v1.UInt64Value{Value: 1}, InodesUsed: &v1.UInt64Value{Value: 1},
	}}
	return &v1.ImageFsInfoResponse{ImageFilesystems: usage, ContainerFilesystems: usage}, nil
}

func isSelected(wanted, labels map[string]string) bool {
	for key, value := range wanted {
		if labels[key] != value {
			return false
		}
	}
	return true
}

// copyOf returns a copy of a message, because the answer is sent after the lock is released.
func copyOf[M proto.Message](message M) M {
	return proto.Clone(message).(M)
}
