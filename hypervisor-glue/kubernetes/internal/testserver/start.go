package testserver

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"nvme-mpt.internal/kubernetes/internal/server"
)

// Variable is the environment variable with the path of the nvme-mpt program for [Real].
const Variable = "NVME_MPT_BINARY"

const (
	// MiB is the unit of the sizes of leases in tests, in bytes.
	MiB = 1 << 20
	// Bytes is the size of a drive in tests.
	Bytes = 64 * MiB
	// Drive is the file name of the drive in a server's folder.
	Drive = "drive.img"
)

// timeout is the timeout of each command. It exceeds any delay of a busy machine.
const timeout = 3 * time.Minute

// Fake returns a fake server with one drive.
func Fake(t testing.TB) *server.Server {
	t.Helper()
	folder := t.TempDir()
	drive := filepath.Join(folder, Drive)
	state := State{Drives: []server.Drive{{Path: drive, Model: "Fake drive"}}, Bytes: Bytes, Unit: MiB}
	if err := state.Store(folder); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &server.Server{Binary: self, StateDir: folder, Unit: MiB, Question: timeout, Change: timeout}
}

// Change changes the state of a fake server.
func Change(t testing.TB, fake *server.Server, change func(*State)) {
	t.Helper()
	state, err := Load(fake.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	change(&state)
	if err := state.Store(fake.StateDir); err != nil {
		t.Fatal(err)
	}
}

// Real starts `nvme-mpt serve` on a file. It skips the test if the environment does not name the program.
func Real(t testing.TB) *server.Server {
	t.Helper()
	binary := os.Getenv(Variable)
	if binary == "" {
		t.Skipf("NOT CHECKED: a real server: set %s to the path of nvme-mpt", Variable)
	}
	folder, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	drive := filepath.Join(folder, Drive)
	if err := os.WriteFile(drive, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(drive, Bytes); err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(folder, "state")
	serve := exec.Command(binary, "serve", "--state-dir", state, "--drive", "path="+drive)
	serve.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var log strings.Builder
	serve.Stderr = &log
	output, err := serve.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.Start(); err != nil {
		t.Fatalf("%s names no program that runs: %v", Variable, err)
	}
	t.Cleanup(func() {
		_ = serve.Process.Signal(syscall.SIGTERM)
		if err := serve.Wait(); err != nil {
			t.Errorf("the server did not end well: %v\n%s", err, &log)
		}
	})
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		if lines.Text() == "ready" {
			go func() { _, _ = io.Copy(io.Discard, output) }()
			return &server.Server{Binary: binary, StateDir: state, Unit: MiB, Question: timeout, Change: timeout}
		}
	}
	t.Fatalf("the server did not become ready:\n%s", &log)
	return nil
}

// Each runs a test with a fake server and with a real one.
func Each(t *testing.T, test func(t *testing.T, server *server.Server)) {
	t.Helper()
	t.Run("fake", func(t *testing.T) { test(t, Fake(t)) })
	t.Run("real", func(t *testing.T) { test(t, Real(t)) })
}
