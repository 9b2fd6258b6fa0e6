package machine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// LogDir contains a log for each process.
const LogDir = "/var/log/cluster"

// logTail is the maximum number of bytes that a message shows of the end of a log.
const logTail = 4 << 10

// Process is a process in the machine.
type Process struct {
	name    string
	log     string
	command *exec.Cmd
	ended   chan struct{}
	// err is set before ended is closed.
	err error
}

// Start starts a program. Its output is appended to the log of this name. The attributes may be nil.
func Start(name string, attributes *syscall.SysProcAttr, environment []string, program string, arguments ...string) (*Process, error) {
	if err := os.MkdirAll(LogDir, 0o755); err != nil {
		return nil, fmt.Errorf("the folder of logs cannot be made: %w", err)
	}
	path := filepath.Join(LogDir, name+".log")
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("the log of %s cannot be made: %w", name, err)
	}
	// The started process has its own copy of the descriptor.
	defer log.Close()
	command := exec.Command(program, arguments...)
	command.Stdout, command.Stderr, command.SysProcAttr = log, log, attributes
	command.Env = environment
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("%s does not start: %w", name, err)
	}
	p := &Process{name: name, log: path, command: command, ended: make(chan struct{})}
	go func() {
		p.err = command.Wait()
		close(p.ended)
	}()
	return p, nil
}

// Ended is closed once the process has ended.
func (p *Process) Ended() <-chan struct{} {
	return p.ended
}

// ExitCode returns the exit status of an ended process; 137 if it was killed.
func (p *Process) ExitCode() int {
	if code := p.command.ProcessState.ExitCode(); code >= 0 {
		return code
	}
	return 137
}

// Signal sends a signal. It has no effect on an ended process.
func (p *Process) Signal(signal syscall.Signal) {
	_ = p.command.Process.Signal(signal)
}

// Kill kills the process and waits for its end.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.ended
}

// Check returns an error if the process has ended.
func (p *Process) Check() error {
	select {
	case <-p.ended:
		return fmt.Errorf("%s has ended (%v):\n%s", p.name, p.err, p.Tail())
	default:
		return nil
	}
}

// HasSaid reports whether the log has this line, written by this process or by an earlier one with the same log.
func (p *Process) HasSaid(line string) bool {
	text, err := os.ReadFile(p.log)
	return err == nil && strings.Contains("\n"+string(text), "\n"+line+"\n")
}

// Tail returns the end of the log.
func (p *Process) Tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-logTail):])
}

// Name returns the name of the process.
func (p *Process) Name() string {
	return p.name
}
