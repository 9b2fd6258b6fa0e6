// Package cdi writes the files by which a container runtime gives sockets to containers.
package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"nvme-mpt.internal/kubernetes/internal/names"
)

// version is the oldest version of CDI with all that is used here: mounts, and dots in names of devices.
const version = "0.6.0"

// Folder is a folder that container runtimes read, such as /var/run/cdi.
type Folder string

// Mount is a folder of the host in a container.
type Mount struct {
	HostPath      string   `json:"hostPath"`
	ContainerPath string   `json:"containerPath"`
	Options       []string `json:"options"`
}

type edits struct {
	Mounts []Mount `json:"mounts"`
}

type device struct {
	Name  string `json:"name"`
	Edits edits  `json:"containerEdits"`
}

type spec struct {
	Version string   `json:"cdiVersion"`
	Kind    string   `json:"kind"`
	Devices []device `json:"devices"`
}

// Name returns the CDI device of an allocation result.
func Name(claim types.UID, index int) string {
	return fmt.Sprintf("%s=%s", names.CDIKind, deviceName(claim, index))
}

func deviceName(claim types.UID, index int) string {
	return fmt.Sprintf("%s-%d", claim, index)
}

func (f Folder) path(claim types.UID) string {
	return filepath.Join(string(f), prefix+string(claim)+suffix)
}

var (
	prefix = strings.ReplaceAll(names.CDIKind, "/", "-") + "_"
	suffix = ".json"
)

// Write makes the devices of a claim, one for each mount, as a whole or not at all.
func (f Folder) Write(claim types.UID, mounts []Mount) error {
	content := spec{Version: version, Kind: names.CDIKind}
	for index, mount := range mounts {
		content.Devices = append(content.Devices, device{
			Name:  deviceName(claim, index),
			Edits: edits{Mounts: []Mount{mount}},
		})
	}
	text, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return fmt.Errorf("CDI devices of claim %s: %w", claim, err)
	}
	if err := os.MkdirAll(string(f), 0o755); err != nil {
		return fmt.Errorf("the CDI folder cannot be made: mount it into the plugin: %w", err)
	}
	path := f.path(claim)
	// Runtimes read names that end in .json or .yaml alone, so they never see a part of a file.
	part := path + ".part"
	if err := os.WriteFile(part, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("CDI file of claim %s: %w", claim, err)
	}
	if err := os.Rename(part, path); err != nil {
		return fmt.Errorf("CDI file of claim %s: %w", claim, err)
	}
	return nil
}

// Remove removes the devices of a claim, if there are any.
func (f Folder) Remove(claim types.UID) error {
	for _, path := range []string{f.path(claim), f.path(claim) + ".part"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("CDI file of claim %s: %w", claim, err)
		}
	}
	return nil
}

// Claims returns the claims that have a file.
func (f Folder) Claims() ([]types.UID, error) {
	entries, err := os.ReadDir(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("the CDI folder cannot be read: %w", err)
	}
	var found []types.UID
	for _, entry := range entries {
		uid, isOurs := strings.CutPrefix(entry.Name(), prefix)
		if !isOurs {
			continue
		}
		uid = strings.TrimSuffix(strings.TrimSuffix(uid, ".part"), suffix)
		found = append(found, types.UID(uid))
	}
	return found, nil
}
