package cri

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
)

// Mount is a folder of the host that is mounted into a container.
type Mount struct {
	HostPath      string   `json:"hostPath"`
	ContainerPath string   `json:"containerPath"`
	Options       []string `json:"options"`
}

// spec is the content of a CDI file, with the fields that a driver for mounts uses.
type spec struct {
	Version string `json:"cdiVersion"`
	Kind    string `json:"kind"`
	Devices []struct {
		Name  string `json:"name"`
		Edits struct {
			Mounts []Mount `json:"mounts"`
		} `json:"containerEdits"`
	} `json:"devices"`
}

// mounts returns the mounts of a CDI device. It reads the CDI files of the folder as other container runtimes do.
func mounts(folder, device string) ([]Mount, error) {
	paths, err := filepath.Glob(filepath.Join(folder, "*.json"))
	if err != nil {
		return nil, err
	}
	var found [][]Mount
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			// The file was removed since the folder was read, together with the claim of another pod.
			continue
		}
		if err != nil {
			return nil, err
		}
		var file spec
		decoder := json.NewDecoder(bytes.NewReader(text))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&file); err != nil {
			return nil, fmt.Errorf("CDI file %s: %w", path, err)
		}
		for _, entry := range file.Devices {
			if file.Kind+"="+entry.Name == device {
				found = append(found, entry.Edits.Mounts)
			}
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("CDI device %s is in %d files of %s: it has to be in one", device, len(found), folder)
	}
	if len(found[0]) == 0 {
		return nil, fmt.Errorf("CDI device %s mounts nothing", device)
	}
	return found[0], nil
}

// reach checks a mount of a container: it must be read-only, and a server must listen on its socket.
func reach(mount Mount, socket string) error {
	if !slices.Contains(mount.Options, "ro") {
		return fmt.Errorf("%s can be written by the container: its options are %v", mount.HostPath, mount.Options)
	}
	connection, err := net.Dial("unix", filepath.Join(mount.HostPath, socket))
	if err != nil {
		return fmt.Errorf("no server listens for %s: %w", mount.ContainerPath, err)
	}
	return connection.Close()
}
