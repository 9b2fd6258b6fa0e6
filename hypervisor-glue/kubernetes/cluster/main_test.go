// Package cluster_test runs the driver in a cluster: etcd, an API server, a controller manager, a scheduler and a kubelet,
// with a container runtime of its own. It is a module of its own, as the driver needs none of them.
package cluster_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"nvme-mpt.internal/kubernetes/cluster/internal/machine"
	"nvme-mpt.internal/kubernetes/cluster/internal/plane"
	"nvme-mpt.internal/kubernetes/internal/testserver"
)

const (
	// programsVariable is the environment variable with the path of a folder in which the built programs of the cluster stay
	// for the next run.
	programsVariable = "NVME_MPT_CLUSTER_PROGRAMS"
	// programs is the folder of the cluster's programs in the machine.
	programs = "/var/programs"
	// image is the folder of the image's programs in the machine.
	image = "/var/image"
)

// packages are the Go packages of the cluster's programs.
var packages = []string{
	"go.etcd.io/etcd/server/v3",
	"k8s.io/kubernetes/cmd/kube-apiserver",
	"k8s.io/kubernetes/cmd/kube-controller-manager",
	"k8s.io/kubernetes/cmd/kube-scheduler",
	"k8s.io/kubernetes/cmd/kubelet",
}

// version is the version of k8s.io/kubernetes in go.mod. Programs of an unknown version refuse feature gates.
const (
	minor   = "36"
	version = "v1.36.3"
)

// notChecked is the reason why no cluster can be started here; empty if one can.
var notChecked string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if machine.IsContainer(os.Args) {
		fmt.Fprintln(os.Stderr, machine.RunContainer(os.Args))
		return 127
	}
	if machine.IsInside() {
		if err := machine.Prepare(plane.Node, plane.ServiceAddress, plane.NodeAddress); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}
	binary := os.Getenv(testserver.Variable)
	switch {
	case os.Geteuid() != 0:
		notChecked = "a cluster: run the test as root"
	case binary == "":
		notChecked = "a cluster: set " + testserver.Variable + " to the path of nvme-mpt"
	default:
		status, err := runMachine(binary)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return status
	}
	return m.Run()
}

// runMachine runs the tests in a machine with all programs.
func runMachine(binary string) (status int, err error) {
	folder, err := os.MkdirTemp("", "nvme-mpt-cluster")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	// The server runs as another user, who must be able to enter the folder.
	if err := os.Chmod(folder, 0o755); err != nil {
		return 0, err
	}
	inside := func(path string) string { return filepath.Join(folder, strings.TrimPrefix(path, "/var")) }
	for _, name := range []string{programs, image, "/var/lib", "/var/log", "/var/run", "/var/tmp"} {
		if err := os.MkdirAll(inside(name), 0o755); err != nil {
			return 0, err
		}
	}
	built := os.Getenv(programsVariable)
	if built == "" {
		built = filepath.Join(folder, "built")
	}
	if built, err = filepath.Abs(built); err != nil {
		return 0, err
	}
	name := "k8s.io/component-base/version"
	flags := fmt.Sprintf("-s -w -X %s.gitMajor=1 -X %s.gitMinor=%s -X %s.gitVersion=%s", name, name, minor, name, version)
	if err := build(".", built+"/", flags, packages...); err != nil {
		return 0, err
	}
	if err := build("..", inside(image)+"/", "", "./cmd/nvme-mpt-dra"); err != nil {
		return 0, err
	}
	for _, path := range packages {
		name := filepath.Base(strings.TrimSuffix(path, "/v3"))
		if err := provide(filepath.Join(built, name), filepath.Join(inside(programs), name)); err != nil {
			return 0, err
		}
	}
	if err := provide(binary, filepath.Join(inside(image), "nvme-mpt")); err != nil {
		return 0, err
	}
	return machine.Run(folder)
}

// build builds programs without optimization, as the driver's tests are built. So the compiled packages that both need are
// built only once.
func build(module, folder, flags string, packages ...string) error {
	arguments := append([]string{"build", "-gcflags=all=-N -l", "-ldflags=" + flags, "-o", folder}, packages...)
	command := exec.Command("go", arguments...)
	command.Dir, command.Stdout, command.Stderr = module, os.Stderr, os.Stderr
	command.Env = append(os.Environ(), "CGO_ENABLED=0", "GOTOOLCHAIN=local")
	if err := command.Run(); err != nil {
		return fmt.Errorf("%v cannot be built: %w", packages, err)
	}
	return nil
}

// provide links or copies a program.
func provide(from, to string) error {
	if os.Link(from, to) == nil {
		return nil
	}
	source, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("the program %s cannot be read: %w", from, err)
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(target, source)
	return errors.Join(err, target.Close())
}
