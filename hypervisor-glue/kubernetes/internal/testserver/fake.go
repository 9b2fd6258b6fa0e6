// Package testserver provides servers for tests: the real nvme-mpt on a file, and a fake that a test can make fail.
package testserver

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"nvme-mpt.internal/kubernetes/internal/server"
)

// State is the state of a fake server. It is stored in a file, which the fake commands change.
type State struct {
	Drives     []server.Drive
	HostDrives []server.HostDrive
	// NSIDs maps physical drives, by path, to their namespaces.
	NSIDs map[string]int64
	// Bytes is the size of each drive, and Unit the unit of its leases.
	Bytes, Unit int64
	Functions   []Function
	// Data has the parts of drives that ids lease, or on which they left data.
	Data []Data
	// Hang makes each command wait for ever, and Garbage makes it print invalid JSON.
	Hang, Garbage bool
	// Refuse is the error message of each change; empty if changes succeed.
	Refuse string
	// Commands is the number of commands run so far.
	Commands int
}

// Function is a function of a fake server.
type Function struct {
	ID        string `json:"id"`
	Socket    string `json:"socket"`
	Drive     string `json:"drive"`
	Limits    string `json:"limits"`
	State     any    `json:"state"`
	Options   string `json:"-"`
	Reserved  int64  `json:"-"`
	Connected bool   `json:"-"`
}

// Data is the part of a drive that an id leases, or on which it left data.
type Data struct {
	ID, Drive string
	Bytes     int64
	Leased    bool
}

func statePath(folder string) string { return filepath.Join(folder, "fake.json") }

// Load returns the state in a folder.
func Load(folder string) (State, error) {
	var state State
	text, err := os.ReadFile(statePath(folder))
	if err != nil {
		return state, fmt.Errorf("the fake server has no state: %w", err)
	}
	// The stored field names are those in Go. Some fields have other names in the commands' output.
	var raw rawState
	if err := json.Unmarshal(text, &raw); err != nil {
		return state, fmt.Errorf("the state of the fake server: %w", err)
	}
	return raw.state(), nil
}

// Store stores the state in a folder.
func (s State) Store(folder string) error {
	text, err := json.Marshal(rawOf(s))
	if err != nil {
		return fmt.Errorf("the state of the fake server: %w", err)
	}
	return os.WriteFile(statePath(folder), text, 0o600)
}

// rawFunction adds the fields that the commands do not print.
type rawFunction struct {
	Function
	StoredOptions   string
	StoredReserved  int64
	StoredConnected bool
}

type rawState struct {
	State
	RawFunctions []rawFunction
}

func rawOf(s State) rawState {
	raw := rawState{State: s}
	raw.Functions = nil
	for _, f := range s.Functions {
		raw.RawFunctions = append(raw.RawFunctions, rawFunction{f, f.Options, f.Reserved, f.Connected})
	}
	return raw
}

func (r rawState) state() State {
	s := r.State
	s.Functions = nil
	for _, f := range r.RawFunctions {
		f.Function.Options, f.Reserved, f.Connected = f.StoredOptions, f.StoredReserved, f.StoredConnected
		s.Functions = append(s.Functions, f.Function)
	}
	return s
}

// IsCommand reports whether a program's arguments are an nvme-mpt command, so that a test binary can act as a fake.
func IsCommand(arguments []string) bool {
	commands := []string{"stats", "capacity", "list", "leases", "drives", "add", "remove"}
	return len(arguments) > 1 && slices.Contains(commands, arguments[1])
}

// Main runs the fake command. It returns the exit status.
func Main(arguments []string) int {
	folder := ""
	var plain []string
	for i := 1; i < len(arguments); i++ {
		switch arguments[i] {
		case "--state-dir":
			i++
			folder = arguments[i]
		case "--unit", "--control":
			i++
		case "--json":
		default:
			plain = append(plain, arguments[i])
		}
	}
	output, err := command(folder, plain)
	if err != nil {
		fmt.Fprintf(os.Stderr, "nvme-mpt: %v\n", err)
		return 1
	}
	fmt.Println(output)
	return 0
}

func command(folder string, arguments []string) (string, error) {
	lock, err := os.OpenFile(filepath.Join(folder, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", fmt.Errorf("no server answers: %w", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("the fake server cannot be locked: %w", err)
	}
	state, err := Load(folder)
	if err != nil {
		return "", err
	}
	if state.Hang {
		time.Sleep(time.Hour)
	}
	state.Commands++
	answer, err := state.run(arguments)
	if err != nil {
		return "", err
	}
	if err := state.Store(folder); err != nil {
		return "", err
	}
	if state.Garbage {
		return "<html>", nil
	}
	text, err := json.Marshal(answer)
	return string(text), err
}

func (s *State) run(arguments []string) (any, error) {
	changes := []string{"add", "remove"}
	if s.Refuse != "" && slices.Contains(changes, arguments[0]) {
		return nil, fmt.Errorf("the server refused: %s", s.Refuse)
	}
	switch arguments[0] {
	case "stats":
		return map[string]any{"drives": s.Drives}, nil
	case "drives":
		return s.HostDrives, nil
	case "capacity":
		return s.capacities(), nil
	case "list":
		return s.Functions, nil
	case "leases":
		return s.leases(arguments[1:])
	case "add":
		return s.add(arguments[1])
	default:
		return s.remove(arguments[1], slices.Contains(arguments, "--force"))
	}
}

func (s *State) capacities() []server.DriveCapacity {
	var capacities []server.DriveCapacity
	for _, drive := range s.Drives {
		capacity := server.DriveCapacity{Drive: drive.Path, NSID: s.NSIDs[drive.Path], Bytes: s.Bytes, LBABytes: 512, Unit: s.Unit, Free: s.Bytes}
		for _, data := range s.Data {
			if data.Drive == drive.Path {
				capacity.Free -= data.Bytes
				capacity.Uses = append(capacity.Uses, server.Use{ID: data.ID, Bytes: data.Bytes, Leased: data.Leased})
			}
		}
		capacities = append(capacities, capacity)
	}
	return capacities
}

func (s *State) leases(arguments []string) (any, error) {
	if arguments[0] == "list" {
		leases := []server.Lease{}
		for _, function := range s.Functions {
			leases = append(leases, server.Lease{ID: function.ID, ReservedPairs: function.Reserved})
		}
		return leases, nil
	}
	id := arguments[1]
	before := len(s.Data)
	s.Data = slices.DeleteFunc(s.Data, func(data Data) bool { return data.ID == id && !data.Leased })
	if len(s.Data) == before {
		return nil, fmt.Errorf("there is no lease %s", id)
	}
	return nil, nil
}

func (s *State) add(options string) (any, error) {
	keys := make(map[string]string)
	for pair := range strings.SplitSeq(options, ",") {
		key, value, _ := strings.Cut(pair, "=")
		keys[key] = value
	}
	size, err := strconv.ParseInt(keys["size"], 10, 64)
	if err != nil {
		return nil, fmt.Errorf("the size: %w", err)
	}
	reserve, _ := strconv.ParseInt(keys["reserve"], 10, 64) // 0 without one.
	id, drive := keys["id"], keys["path"]
	if slices.ContainsFunc(s.Functions, func(f Function) bool { return f.ID == id }) {
		return nil, fmt.Errorf("two functions have the id %s", id)
	}
	own := slices.IndexFunc(s.Data, func(data Data) bool { return data.ID == id && data.Drive == drive })
	if own < 0 {
		capacities := s.capacities()
		place := slices.IndexFunc(capacities, func(capacity server.DriveCapacity) bool { return capacity.Drive == drive })
		if place < 0 || capacities[place].Free < size {
			return nil, fmt.Errorf("drive %s has no room for %d bytes", drive, size)
		}
		s.Data = append(s.Data, Data{ID: id, Drive: drive, Bytes: size})
		own = len(s.Data) - 1
	}
	s.Data[own].Leased = true
	function := Function{ID: id, Socket: keys["socket"], Drive: drive, State: "waiting", Options: options, Reserved: reserve}
	s.Functions = append(s.Functions, function)
	return function, os.WriteFile(function.Socket, nil, 0o600)
}

func (s *State) remove(id string, force bool) (any, error) {
	place := slices.IndexFunc(s.Functions, func(f Function) bool { return f.ID == id })
	if place < 0 {
		return nil, fmt.Errorf("there is no function %s", id)
	}
	function := s.Functions[place]
	if function.Connected && !force {
		return nil, fmt.Errorf("a VMM is connected to function %s", id)
	}
	s.Functions = slices.Delete(s.Functions, place, place+1)
	for i := range s.Data {
		if s.Data[i].ID == id {
			s.Data[i].Leased = false
		}
	}
	return map[string]any{"function": function, "trouble": nil}, os.Remove(function.Socket)
}
