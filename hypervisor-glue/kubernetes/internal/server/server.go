// Package server controls an nvme-mpt server through the nvme-mpt command.
package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"nvme-mpt.internal/kubernetes/internal/folder"
)

// Drive is a drive that the server has opened.
type Drive struct {
	Path       string      `json:"path"`
	Model      string      `json:"model"`
	Gone       bool        `json:"gone"`
	QueuePairs *QueuePairs `json:"queue_pairs"`
	// CriticalWarning has the bits of the drive's last SMART report; 0 without a report.
	CriticalWarning Warnings `json:"critical_warning"`
}

// Warnings are Critical Warning bits of SMART / Health Information (NVMe Base 2.0, section 5.16.1.3).
type Warnings uint8

// Warnings of a drive. The bit of the Persistent Memory Region is left out, as functions do not use the region.
const (
	WarningSpare Warnings = 1 << iota
	WarningTemperature
	WarningReliability
	WarningReadOnly
	WarningBackup
)

// Reasons returns a word for each warning. Unknown bits are skipped.
func (w Warnings) Reasons() []string {
	var reasons []string
	for bit, reason := range []string{"spare", "temperature", "reliability", "read-only", "backup"} {
		if w&(1<<bit) != 0 {
			reasons = append(reasons, reason)
		}
	}
	return reasons
}

// QueuePairs counts I/O queue pairs of a physical drive.
type QueuePairs struct {
	Total    int64 `json:"total"`
	Reserved int64 `json:"reserved"`
}

// DriveCapacity is the capacity report of a drive's namespace, in bytes. Only physical drives have namespaces other than 1.
type DriveCapacity struct {
	Drive    string `json:"drive"`
	NSID     int64  `json:"nsid"`
	Bytes    int64  `json:"bytes"`
	LBABytes int64  `json:"lba_bytes"`
	Unit     int64  `json:"unit"`
	Free     int64  `json:"free"`
	Uses     []Use  `json:"uses"`
}

// Use is the part of a drive that an id has: it leases the part, or left data there.
type Use struct {
	ID     string `json:"id"`
	Bytes  int64  `json:"bytes"`
	Leased bool   `json:"leased"`
}

// Lease is a lease in the ledger.
type Lease struct {
	ID            string `json:"id"`
	ReservedPairs int64  `json:"reserved_pairs"`
}

// HostDrive is an NVMe function of the host.
type HostDrive struct {
	Address  string `json:"address"`
	NUMANode *int64 `json:"numa_node"`
}

// Function is a function that the server offers.
type Function struct {
	ID     string `json:"id"`
	Socket string `json:"socket"`
	Drive  string `json:"drive"`
	Limits string `json:"limits"`
	State  State  `json:"state"`
}

// State is the state of a function. Only failures are distinguished.
type State struct {
	// Failed is the reason why the function cannot be offered, if any.
	Failed string
}

// UnmarshalJSON reads "waiting", "connected" and "busy", or {"failed":{"reason":…}}.
func (s *State) UnmarshalJSON(text []byte) error {
	var word string
	if json.Unmarshal(text, &word) == nil {
		return nil
	}
	var failed struct {
		Failed struct {
			Reason string `json:"reason"`
		} `json:"failed"`
	}
	if err := json.Unmarshal(text, &failed); err != nil {
		return fmt.Errorf("the state %s of a function is not known: use an nvme-mpt of the same version: %w", text, err)
	}
	s.Failed = failed.Failed.Reason
	return nil
}

// Options describe a function to add. The server chooses values that are zero.
type Options struct {
	ID        string
	Socket    string
	Drive     string
	Namespace int64
	Size      int64
	Unit      int64
	Reserve   int64
	Queues    int64
	IOPS      int64
	Bandwidth int64
	Weight    int64
	Owner     string
	Mode      string
}

// String returns the options in the form of `nvme-mpt add`. Values with a comma are quoted.
func (o Options) String() string {
	var text strings.Builder
	add := func(key, value string) {
		if value == "" {
			return
		}
		if text.Len() > 0 {
			text.WriteByte(',')
		}
		if strings.ContainsAny(value, ",\"") {
			value = `"` + value + `"`
		}
		text.WriteString(key + "=" + value)
	}
	number := func(key string, value int64) {
		if value > 0 {
			add(key, strconv.FormatInt(value, 10))
		}
	}
	add("socket", o.Socket)
	add("path", o.Drive)
	number("namespace", o.Namespace)
	add("id", o.ID)
	number("size", o.Size)
	number("unit", o.Unit)
	number("queues", o.Queues)
	number("reserve", o.Reserve)
	number("iops", o.IOPS)
	number("bandwidth", o.Bandwidth)
	number("weight", o.Weight)
	add("owner", o.Owner)
	add("mode", o.Mode)
	return text.String()
}

// Server is a running nvme-mpt server, controlled by the nvme-mpt command.
type Server struct {
	// Binary is the path of the command.
	Binary string
	// StateDir is the state directory. Commands run as its owner.
	StateDir string
	// Control is the control socket; empty for the one in the state directory.
	Control string
	// Unit is the unit of leases by size in bytes; 0 for each drive's default.
	Unit int64
	// Question is the timeout for queries.
	Question time.Duration
	// Change is the timeout for changes. It includes the erasure of previous owners' data.
	Change time.Duration
}

// Drives returns the drives that the server has opened.
func (s *Server) Drives(ctx context.Context) ([]Drive, error) {
	var stats struct {
		Drives []Drive `json:"drives"`
	}
	err := s.ask(ctx, s.Question, &stats, "stats", "--json")
	return stats.Drives, err
}

// Capacities returns the capacity of each namespace of each drive.
func (s *Server) Capacities(ctx context.Context) ([]DriveCapacity, error) {
	arguments := []string{"capacity", "--json"}
	if s.Unit > 0 {
		arguments = append(arguments, "--unit", strconv.FormatInt(s.Unit, 10))
	}
	var capacities []DriveCapacity
	err := s.ask(ctx, s.Question, &capacities, arguments...)
	return capacities, err
}

// Leases returns the leases in the ledger.
func (s *Server) Leases(ctx context.Context) ([]Lease, error) {
	var leases []Lease
	err := s.ask(ctx, s.Question, &leases, "leases", "list", "--json")
	return leases, err
}

// HostDrives returns the NVMe functions of the host.
func (s *Server) HostDrives(ctx context.Context) ([]HostDrive, error) {
	var drives []HostDrive
	err := s.ask(ctx, s.Question, &drives, "drives", "--json")
	return drives, err
}

// Functions returns the functions that the server offers.
func (s *Server) Functions(ctx context.Context) ([]Function, error) {
	var functions []Function
	err := s.ask(ctx, s.Question, &functions, "list", "--json")
	return functions, err
}

// Add adds a function.
func (s *Server) Add(ctx context.Context, options Options) error {
	var function Function
	return s.ask(ctx, s.Change, &function, "add", "--json", options.String())
}

// Remove removes a function and ends its lease. Its data stays. With force, it also disconnects a connected VMM.
func (s *Server) Remove(ctx context.Context, id string, force bool) error {
	arguments := []string{"remove", "--json", id}
	if force {
		arguments = append(arguments, "--force")
	}
	var removed json.RawMessage
	return s.ask(ctx, s.Change, &removed, arguments...)
}

// Release releases the lease and the data of an id. The data is erased before another id gets its space.
func (s *Server) Release(ctx context.Context, id string) error {
	_, err := s.run(ctx, s.Question, "leases", "release", id)
	return err
}

func (s *Server) ask(ctx context.Context, timeout time.Duration, answer any, arguments ...string) error {
	output, err := s.run(ctx, timeout, arguments...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(output, answer); err != nil {
		return fmt.Errorf("nvme-mpt %s answers what is not understood: use an nvme-mpt of the same version: %w",
			strings.Join(arguments, " "), err)
	}
	return nil
}

// grace is the time for reading the rest of a command's output, after the command was killed at its deadline.
const grace = time.Second

func (s *Server) run(ctx context.Context, timeout time.Duration, arguments ...string) ([]byte, error) {
	commandText := "nvme-mpt " + strings.Join(arguments, " ")
	user, err := s.User()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	arguments = append(arguments, "--state-dir", s.StateDir)
	if s.Control != "" {
		arguments = append(arguments, "--control", s.Control)
	}
	command := exec.CommandContext(ctx, s.Binary, arguments...)
	command.WaitDelay = grace
	command.SysProcAttr = &syscall.SysProcAttr{Credential: user.credential()}
	var output, complaint bytes.Buffer
	command.Stdout, command.Stderr = &output, &complaint
	switch err := command.Run(); {
	case err == nil:
		return output.Bytes(), nil
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return nil, fmt.Errorf("%s did not answer within %s: look at the server's log: %w", commandText, timeout, ctx.Err())
	default:
		return nil, fmt.Errorf("%s: %s: %w", commandText, strings.TrimSpace(complaint.String()), err)
	}
}

// User is a user of this host and the user's group.
type User struct {
	UID, GID int
}

// User returns the owner of the state directory, as whom the server runs.
func (s *Server) User() (User, error) {
	uid, gid, err := folder.OwnerOf(s.StateDir)
	if err != nil {
		return User{}, fmt.Errorf("the state folder of nvme-mpt cannot be seen: start `nvme-mpt serve`, or name its folder with -state-dir: %w", err)
	}
	return User{UID: uid, GID: gid}, nil
}

// IsOther reports whether this is not the user of this process.
func (u User) IsOther() bool {
	return u.UID != os.Geteuid()
}

// credential returns the credential for running a command as this user; nil for the user of this process.
func (u User) credential() *syscall.Credential {
	if !u.IsOther() {
		return nil
	}
	return &syscall.Credential{Uid: uint32(u.UID), Gid: uint32(u.GID)}
}
