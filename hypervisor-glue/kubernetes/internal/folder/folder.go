// Package folder opens folders on paths where other users may have put links.
//
// It follows the rule of the crate nvme-mpt-paths. A link is followed only if root or this process's user owns it, and
// no other user can replace it in its folder. The result is a descriptor, and all work in the folder uses that
// descriptor.
package folder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// oPath is O_PATH, which package syscall lacks. It opens a descriptor that only identifies a file.
const oPath = 0x200000

// linksMax is the maximum number of links on a path, equal to the kernel's limit.
const linksMax = 40

// Open opens a folder.
func Open(path string) (*os.Root, error) {
	return open(path, false)
}

// Make opens a folder. It creates the folder and its parents if they do not exist.
func Make(path string) (*os.Root, error) {
	return open(path, true)
}

func open(path string, makes bool) (*os.Root, error) {
	found, err := walk(path, makes)
	if err != nil {
		return nil, err
	}
	defer func() { _ = syscall.Close(found) }()
	return os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", found))
}

// OwnerOf returns the user and the group that own the target of a path.
func OwnerOf(path string) (uid, gid int, err error) {
	found, err := walk(path, false)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = syscall.Close(found) }()
	var stat syscall.Stat_t
	if err := syscall.Fstat(found, &stat); err != nil {
		return 0, 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return int(stat.Uid), int(stat.Gid), nil
}

// Owner returns the user and the group that own an open folder.
func Owner(folder *os.Root) (uid, gid int, err error) {
	info, err := folder.Stat(".")
	if err != nil {
		return 0, 0, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, errors.New("the owner of a folder is not known on this system")
	}
	return int(stat.Uid), int(stat.Gid), nil
}

// Sub opens a folder inside another one, and creates it if it does not exist. It refuses a link of that name.
func Sub(folder *os.Root, name string) (*os.Root, error) {
	if err := folder.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	there, err := folder.Lstat(name)
	if err != nil {
		return nil, err
	}
	sub, err := folder.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	opened, err := sub.Stat(".")
	if err != nil || !os.SameFile(there, opened) {
		_ = sub.Close()
		return nil, errors.Join(err, fmt.Errorf("%s in %s is a link, and is not followed", name, folder.Name()))
	}
	return sub, nil
}

// Give changes the owner of an open folder to a user. The present owner must be root, this process's user, or that
// user.
func Give(folder *os.Root, uid, gid int) error {
	owner, _, err := Owner(folder)
	if err != nil {
		return err
	}
	if owner != uid && !isTrusted(owner) {
		return fmt.Errorf("%s belongs to user %d", folder.Name(), owner)
	}
	opened, err := folder.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(opened.Chown(uid, gid), opened.Close())
}

// Replace replaces a file in a folder atomically, by way of the file named part.
func Replace(folder *os.Root, name, part string, text []byte) error {
	// Another process may have left a partial file under this name, or another user a link.
	if err := folder.Remove(part); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := folder.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	return folder.Rename(part, name)
}

func isTrusted(user int) bool {
	return user == 0 || user == os.Geteuid()
}

// isSafe reports whether only trusted users can replace an entry of a folder.
func isSafe(folder, entry *syscall.Stat_t) bool {
	othersWrite := folder.Mode&0o022 != 0
	isSticky := folder.Mode&syscall.S_ISVTX != 0
	return isTrusted(int(folder.Uid)) && (!othersWrite || isSticky && isTrusted(int(entry.Uid)))
}

// walk opens the target of a path with O_PATH. With makes, it creates missing folders.
func walk(path string, makes bool) (found int, err error) {
	path, err = filepath.Abs(path)
	if err != nil {
		return 0, err
	}
	here, err := syscall.Open("/", oPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: "/", Err: err}
	}
	defer func() {
		if err != nil {
			_ = syscall.Close(here)
		}
	}()
	at := "/"
	left := strings.Split(path, "/")
	for links := 0; len(left) > 0; {
		name := left[0]
		left = left[1:]
		if name == "" || name == "." {
			continue
		}
		next, entry, err := step(here, name, makes)
		at := filepath.Join(at, name)
		if err != nil {
			return 0, &fs.PathError{Op: "open", Path: at, Err: err}
		}
		if entry.Mode&syscall.S_IFMT != syscall.S_IFLNK {
			_ = syscall.Close(here)
			here = next
			continue
		}
		target, err := follow(here, next, entry, at)
		_ = syscall.Close(next)
		if err != nil {
			return 0, err
		}
		if links++; links > linksMax {
			return 0, &fs.PathError{Op: "open", Path: at, Err: syscall.ELOOP}
		}
		if filepath.IsAbs(target) {
			root, err := syscall.Open("/", oPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
			if err != nil {
				return 0, &fs.PathError{Op: "open", Path: "/", Err: err}
			}
			_ = syscall.Close(here)
			here = root
		}
		left = append(strings.Split(target, "/"), left...)
	}
	return here, nil
}

// step opens an entry of a folder without following it if it is a link.
func step(here int, name string, makes bool) (int, *syscall.Stat_t, error) {
	const flags = oPath | syscall.O_NOFOLLOW | syscall.O_CLOEXEC
	next, err := syscall.Openat(here, name, flags, 0)
	if errors.Is(err, syscall.ENOENT) && makes {
		if err := syscall.Mkdirat(here, name, 0o755); err != nil && !errors.Is(err, syscall.EEXIST) {
			return 0, nil, err
		}
		next, err = syscall.Openat(here, name, flags, 0)
	}
	if err != nil {
		return 0, nil, err
	}
	var entry syscall.Stat_t
	if err := syscall.Fstat(next, &entry); err != nil {
		_ = syscall.Close(next)
		return 0, nil, err
	}
	return next, &entry, nil
}

// follow returns the target of a link, if no other user can change the link.
func follow(here, link int, entry *syscall.Stat_t, path string) (string, error) {
	var folder syscall.Stat_t
	if err := syscall.Fstat(here, &folder); err != nil {
		return "", &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if !isTrusted(int(entry.Uid)) || !isSafe(&folder, entry) {
		return "", fmt.Errorf("%s is a symbolic link that another user could change, and is not followed: give the path to which it leads", path)
	}
	return readlink(link)
}
