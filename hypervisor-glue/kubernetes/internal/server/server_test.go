package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"nvme-mpt.internal/kubernetes/internal/server"
	"nvme-mpt.internal/kubernetes/internal/testserver"
)

func TestMain(m *testing.M) {
	if testserver.IsCommand(os.Args) {
		os.Exit(testserver.Main(os.Args))
	}
	os.Exit(m.Run())
}

func TestFunctionsComeAndGo(t *testing.T) {
	testserver.Each(t, func(t *testing.T, s *server.Server) {
		drives, err := s.Drives(t.Context())
		if err != nil || len(drives) != 1 || drives[0].Gone || drives[0].Model == "" {
			t.Fatalf("drives %v, %v", drives, err)
		}
		options := server.Options{
			ID: "a", Socket: filepath.Join(s.StateDir, "a.sock"), Drive: drives[0].Path,
			Size: 8 * testserver.MiB, Unit: testserver.MiB, IOPS: 20_000, Bandwidth: testserver.MiB, Mode: "0600",
		}
		if err := s.Add(t.Context(), options); err != nil {
			t.Fatal(err)
		}
		functions, err := s.Functions(t.Context())
		if err != nil || len(functions) != 1 {
			t.Fatalf("functions %v, %v", functions, err)
		}
		if function := functions[0]; function.ID != "a" || function.Socket != options.Socket || function.Drive != options.Drive || function.State.Failed != "" {
			t.Errorf("function %v", function)
		}
		capacities, err := s.Capacities(t.Context())
		if err != nil || len(capacities) != 1 {
			t.Fatalf("capacities %v, %v", capacities, err)
		}
		capacity := capacities[0]
		if capacity.Drive != drives[0].Path || capacity.Bytes != testserver.Bytes || capacity.Free != 56*testserver.MiB || capacity.LBABytes != 512 || capacity.Unit == 0 {
			t.Errorf("capacity %v", capacity)
		}
		if len(capacity.Uses) != 1 || capacity.Uses[0] != (server.Use{ID: "a", Bytes: 8 * testserver.MiB, Leased: true}) {
			t.Errorf("uses %v", capacity.Uses)
		}
		leases, err := s.Leases(t.Context())
		if err != nil || len(leases) != 1 || leases[0].ID != "a" {
			t.Errorf("leases %v, %v", leases, err)
		}
		if _, err := s.HostDrives(t.Context()); err != nil {
			t.Error(err)
		}
		if err := s.Remove(t.Context(), "a", false); err != nil {
			t.Fatal(err)
		}
		if err := s.Release(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		if capacities, err := s.Capacities(t.Context()); err != nil || capacities[0].Free != testserver.Bytes {
			t.Errorf("capacities %v, %v", capacities, err)
		}
		if err := s.Remove(t.Context(), "a", true); err == nil || !strings.Contains(err.Error(), "nvme-mpt remove --json a") {
			t.Errorf("the error is %v", err)
		}
	})
}

func TestACommandThatHangsIsGivenUp(t *testing.T) {
	s := testserver.Fake(t)
	testserver.Change(t, s, func(state *testserver.State) { state.Hang = true })
	s.Question = 300 * time.Millisecond
	_, err := s.Drives(t.Context())
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "nvme-mpt stats --json did not answer within 300ms") {
		t.Errorf("the error is %v", err)
	}
}

func TestErrorsNameCulpritAndRemedy(t *testing.T) {
	s := testserver.Fake(t)
	testserver.Change(t, s, func(state *testserver.State) { state.Garbage = true })
	if _, err := s.Functions(t.Context()); err == nil || !strings.Contains(err.Error(), "same version") {
		t.Errorf("the error is %v", err)
	}
	absent := *s
	absent.Binary = "/no/nvme-mpt"
	if _, err := absent.Functions(t.Context()); err == nil || !strings.Contains(err.Error(), "/no/nvme-mpt") {
		t.Errorf("the error is %v", err)
	}
	absent.StateDir = "/no/state"
	if _, err := absent.Functions(t.Context()); err == nil || !strings.Contains(err.Error(), "-state-dir") {
		t.Errorf("the error is %v", err)
	}
}

func TestStatesAreRead(t *testing.T) {
	for _, test := range []struct{ text, failed, says string }{
		{`"waiting"`, "", ""},
		{`{"failed":{"reason":"no drive"}}`, "no drive", ""},
		{`7`, "", "same version"},
	} {
		var state server.State
		err := state.UnmarshalJSON([]byte(test.text))
		if state.Failed != test.failed || (err == nil) != (test.says == "") || (err != nil && !strings.Contains(err.Error(), test.says)) {
			t.Errorf("%s is %v, %v", test.text, state, err)
		}
	}
}

func TestWarningsOfDrivesAreRead(t *testing.T) {
	for _, test := range []struct {
		text    string
		warning server.Warnings
		reasons string
	}{
		{`{"path":"a"}`, 0, ""}, // A server that does not report them.
		{`{"path":"a","critical_warning":null}`, 0, ""},
		{`{"path":"a","critical_warning":9}`, server.WarningSpare | server.WarningReadOnly, "spare read-only"},
	} {
		var drive server.Drive
		err := json.Unmarshal([]byte(test.text), &drive)
		reasons := strings.Join(drive.CriticalWarning.Reasons(), " ")
		if err != nil || drive.CriticalWarning != test.warning || reasons != test.reasons {
			t.Errorf("%s has %08b, %s, %v", test.text, drive.CriticalWarning, reasons, err)
		}
	}
}

func TestOptionsWithCommasStandInQuotes(t *testing.T) {
	options := server.Options{ID: "a", Drive: "/srv/a,b.img"}
	if text := options.String(); text != `path="/srv/a,b.img",id=a` {
		t.Errorf("options %s", text)
	}
}

func TestAFolderOfAnotherUserHasCommandsOfThatUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT CHECKED: only root runs commands of other users")
	}
	// The state directory belongs to user 65534, who can reach a folder in /tmp.
	folder, err := os.MkdirTemp("/tmp", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	const nobody = 65534
	if err := os.Chown(folder, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(folder, "nvme-mpt")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho \"[{\\\"id\\\":\\\"$(id -u):$(id -g)\\\"}]\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	s := server.Server{Binary: script, StateDir: folder, Question: 3 * time.Minute}
	leases, err := s.Leases(t.Context())
	if err != nil || leases[0].ID != "65534:65534" {
		t.Errorf("%v, %v", leases, err)
	}
	if user, err := s.User(); err != nil || !user.IsOther() || user.UID != nobody {
		t.Errorf("%v, %v", user, err)
	}
}
