// Package machine isolates a cluster in a machine: mounts, processes and a network that end with the test.
package machine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// marker is the environment variable with the path of the machine's /var. It is set inside the machine.
const marker = "NVME_MPT_CLUSTER_VAR"

// Self is a path of this program that stays valid inside the machine.
const Self = "/proc/self/exe"

// IsInside reports whether this process runs in a machine.
func IsInside() bool {
	return os.Getenv(marker) != ""
}

// Run runs this program again as the first process of a machine, with the folder as the machine's /var. It returns the
// exit status.
//
// The machine ends with this process and with its parent: the kernel kills all processes of a PID namespace when the
// first one ends.
func Run(folder string) (int, error) {
	// The kernel sends the signal when the thread that started the child ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0, 0, 0); err != nil {
		return 0, fmt.Errorf("the machine does not end with its parent: %w", err)
	}
	command := exec.CommandContext(ctx, Self, os.Args[1:]...)
	command.Env = append(os.Environ(), marker+"="+folder)
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL,
	}
	err := command.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		// A process that was killed has no exit status.
		return max(exit.ExitCode(), 1), nil
	}
	if err != nil {
		return 0, fmt.Errorf("the machine does not start: run the test as root, with namespaces in the kernel: %w", err)
	}
	return 0, nil
}

// Prepare sets up the mounts and the network of the machine. The loopback interface gets these addresses.
func Prepare(hostname string, addresses ...netip.Addr) error {
	steps := []struct {
		what string
		do   func() error
	}{
		{"private mounts", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") }},
		{"/proc of the machine's processes", func() error {
			return unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		}},
		// kubelet sets kernel parameters, which belong to the host.
		{"kernel parameters that are read only", func() error { return bindReadOnly("/proc/sys") }},
		{"/sys that is read only", func() error { return readOnly("/sys", unix.AT_RECURSIVE) }},
		{"/var of the machine", func() error { return unix.Mount(os.Getenv(marker), "/var", "", unix.MS_BIND, "") }},
		{"parameters that kubelet asks for", kernelParameters},
		{"the host's name", func() error { return unix.Sethostname([]byte(hostname)) }},
		{"the loopback interface", func() error { return loopback(addresses) }},
	}
	for _, step := range steps {
		if err := step.do(); err != nil {
			return fmt.Errorf("the machine does not get %s: run the test as root on Linux 5.12 or newer: %w", step.what, err)
		}
	}
	return nil
}

// kernelParameters mounts files over the parameters that kubelet sets, with the values that it expects.
func kernelParameters() error {
	const folder = "/var/lib/parameters"
	if err := os.Mkdir(folder, 0o755); err != nil {
		return err
	}
	for name, value := range map[string]string{
		"kernel/keys/root_maxbytes": "25000000",
		"kernel/keys/root_maxkeys":  "1000000",
		"kernel/panic":              "10",
		"kernel/panic_on_oops":      "1",
		"vm/overcommit_memory":      "1",
		"vm/panic_on_oom":           "0",
	} {
		file := filepath.Join(folder, filepath.Base(name))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(file, filepath.Join("/proc/sys", name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func bindReadOnly(path string) error {
	if err := unix.Mount(path, path, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return readOnly(path, 0)
}

func readOnly(path string, flags uint) error {
	return unix.MountSetattr(unix.AT_FDCWD, path, flags, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
}

// loopback starts the interface `lo`. The machine's processes reach each other through it, but not the host.
func loopback(addresses []netip.Addr) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request); err != nil {
		return err
	}
	for number, address := range addresses {
		alias, err := unix.NewIfreq(fmt.Sprintf("lo:%d", number+1))
		if err != nil {
			return err
		}
		if err := alias.SetInet4Addr(address.AsSlice()); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(socket, unix.SIOCSIFADDR, alias); err != nil {
			return fmt.Errorf("address %s: %w", address, err)
		}
	}
	return nil
}
