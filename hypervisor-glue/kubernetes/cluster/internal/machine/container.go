package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// containerCommand is the first argument with which this program runs as the first process of a container.
const containerCommand = "container"

// ImagePath is the folder of the image's programs inside a container.
const ImagePath = "/image"

// Mount is a file or folder of the machine that is mounted into a container.
type Mount struct {
	Source, Target string
	ReadOnly       bool
}

// Container describes a process and its privileges. It sees the host's user land read-only.
type Container struct {
	// Root is an empty folder of the machine, on which the container's root is mounted.
	Root string
	// Image is the machine's folder with the image's programs.
	Image       string
	Arguments   []string
	Environment []string
	Mounts      []Mount
	User, Group int
	Groups      []int
	// Capabilities are all capabilities that the process can have.
	Capabilities    []string
	NoNewPrivileges bool
	ReadOnlyRoot    bool
}

// capabilities maps the names of supported capabilities to their numbers.
var capabilities = map[string]uintptr{
	"CHOWN":        unix.CAP_CHOWN,
	"DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE,
	"SETGID":       unix.CAP_SETGID,
	"SETUID":       unix.CAP_SETUID,
}

// StartContainer starts the process of a container. All processes that it starts end with it.
func StartContainer(name string, container Container) (*Process, error) {
	text, err := json.Marshal(container)
	if err != nil {
		return nil, fmt.Errorf("container %s: %w", name, err)
	}
	attributes := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	return Start(name, attributes, nil, Self, containerCommand, string(text))
}

// IsContainer reports whether this process is the first one of a container.
func IsContainer(arguments []string) bool {
	return len(arguments) == 3 && arguments[1] == containerCommand && IsInside()
}

// RunContainer turns this process into the process of the container. It returns only on an error.
func RunContainer(arguments []string) error {
	// Capabilities belong to a thread.
	runtime.LockOSThread()
	var container Container
	if err := json.Unmarshal([]byte(arguments[2]), &container); err != nil {
		return fmt.Errorf("the container's description cannot be read: %w", err)
	}
	if err := container.mount(); err != nil {
		return fmt.Errorf("the container's root: %w", err)
	}
	if err := container.drop(); err != nil {
		return fmt.Errorf("the container's rights: %w", err)
	}
	if err := os.Setenv("PATH", ImagePath+":/usr/bin"); err != nil {
		return err
	}
	program, err := exec.LookPath(container.Arguments[0])
	if err != nil {
		return fmt.Errorf("the image does not have the program: %w", err)
	}
	environment := append([]string{"PATH=" + os.Getenv("PATH")}, container.Environment...)
	return fmt.Errorf("%s: %w", program, syscall.Exec(program, container.Arguments, environment))
}

func (c Container) mount() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", c.Root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("tmpfs on %s: %w", c.Root, err)
	}
	own := []Mount{{"/usr", "/usr", true}, {c.Image, ImagePath, true}, {"/dev/null", "/dev/null", false}, {"/dev/urandom", "/dev/urandom", false}}
	for _, name := range []string{"/bin", "/lib", "/lib64"} {
		target, err := os.Readlink(name)
		switch {
		case err == nil:
			if err := os.Symlink(target, filepath.Join(c.Root, name)); err != nil {
				return err
			}
		case !errors.Is(err, os.ErrNotExist):
			own = append(own, Mount{name, name, true})
		}
	}
	for _, mount := range append(own, c.Mounts...) {
		if err := c.bind(mount); err != nil {
			return fmt.Errorf("%s at %s: %w", mount.Source, mount.Target, err)
		}
	}
	proc := filepath.Join(c.Root, "proc")
	if err := os.Mkdir(proc, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("proc", proc, "proc", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("/proc: %w", err)
	}
	if err := unix.Chroot(c.Root); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if c.ReadOnlyRoot {
		return readOnly("/", 0)
	}
	return nil
}

func (c Container) bind(mount Mount) error {
	info, err := os.Stat(mount.Source)
	if err != nil {
		return err
	}
	target := filepath.Join(c.Root, mount.Target)
	if info.IsDir() {
		err = os.MkdirAll(target, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
		err = os.WriteFile(target, nil, 0o644)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(mount.Source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	if mount.ReadOnly {
		return readOnly(target, unix.AT_RECURSIVE)
	}
	return nil
}

// drop reduces the process to the container's capabilities and user.
func (c Container) drop() error {
	var kept []uintptr
	for _, name := range c.Capabilities {
		number, isKnown := capabilities[name]
		if !isKnown {
			return fmt.Errorf("capability %s is not known here: add its number", name)
		}
		kept = append(kept, number)
	}
	for number := uintptr(0); number <= unix.CAP_LAST_CAP; number++ {
		if slices.Contains(kept, number) {
			continue
		}
		// An older kernel does not know the last capabilities.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, number, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("capability %d: %w", number, err)
		}
	}
	if err := syscall.Setgroups(c.Groups); err != nil {
		return fmt.Errorf("groups %v: %w", c.Groups, err)
	}
	if err := syscall.Setgid(c.Group); err != nil {
		return fmt.Errorf("group %d: %w", c.Group, err)
	}
	if err := syscall.Setuid(c.User); err != nil {
		return fmt.Errorf("user %d: %w", c.User, err)
	}
	if c.NoNewPrivileges {
		return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	}
	return nil
}
