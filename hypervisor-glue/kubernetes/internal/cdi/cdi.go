// Package cdi writes the CDI files by which a container runtime mounts socket folders into containers.
package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"nvme-mpt.internal/kubernetes/internal/folder"
	"nvme-mpt.internal/kubernetes/internal/names"
)

// version is the oldest CDI version that has mounts, and dots in device names.
const version = "0.6.0"

// Folder is a folder that container runtimes read, such as /var/run/cdi.
type Folder string

// Mount is a folder of the host that is mounted into a container.
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

func fileName(claim types.UID) string {
	return prefix + string(claim) + suffix
}

// partSuffix ends the name of a file that is still being written.
const partSuffix = ".part"

var (
	prefix = strings.ReplaceAll(names.CDIKind, "/", "-") + "_"
	suffix = ".json"
)

// Write replaces the file of a claim atomically. The file has one CDI device for each mount.
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
	root, err := folder.Make(string(f))
	if err != nil {
		return fmt.Errorf("the CDI folder cannot be made: mount it into the plugin: %w", err)
	}
	defer func() { _ = root.Close() }()
	// Runtimes read only names that end in .json or .yaml, so they never see a partial file.
	name := fileName(claim)
	if err := folder.Replace(root, name, name+partSuffix, append(text, '\n')); err != nil {
		return fmt.Errorf("CDI file of claim %s: %w", claim, err)
	}
	return nil
}

// Remove removes the file of a claim, if there is one.
func (f Folder) Remove(claim types.UID) error {
	root, err := folder.Open(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("CDI file of claim %s: %w", claim, err)
	}
	defer func() { _ = root.Close() }()
	for _, name := range []string{fileName(claim), fileName(claim) + partSuffix} {
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("CDI file of claim %s: %w", claim, err)
		}
	}
	return nil
}

// Claims returns the claims that have a file.
func (f Folder) Claims() ([]types.UID, error) {
	root, err := folder.Open(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("the CDI folder cannot be opened: %w", err)
	}
	defer func() { _ = root.Close() }()
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("the CDI folder cannot be read: %w", err)
	}
	var found []types.UID
	for _, entry := range entries {
		uid, isOurs := strings.CutPrefix(entry.Name(), prefix)
		if !isOurs {
			continue
		}
		uid = strings.TrimSuffix(strings.TrimSuffix(uid, partSuffix), suffix)
		found = append(found, types.UID(uid))
	}
	return found, nil
}
