package folder

import (
	"syscall"
	"unsafe"
)

// readlink returns the target of an open link. Package syscall lacks readlinkat(2) for descriptors.
func readlink(link int) (string, error) {
	var empty [1]byte
	target := make([]byte, 4096)
	length, _, errno := syscall.Syscall6(syscall.SYS_READLINKAT, uintptr(link), uintptr(unsafe.Pointer(&empty[0])),
		uintptr(unsafe.Pointer(&target[0])), uintptr(len(target)), 0, 0)
	if errno != 0 {
		return "", errno
	}
	return string(target[:length]), nil
}
