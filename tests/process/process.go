// Package process runs other programs for tools below tests: routers, and the tool itself as
// something else.
package process

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"
)

// Process is a child process, and those that it has started itself.
type Process struct {
	cmd  *exec.Cmd
	log  string        // the file of its output; empty: this process's
	done chan struct{} // closed when it has ended
}

// Start starts a command. Its output goes to a file, if one is named. On Linux, the process ends
// with this one, however this one ends.
func Start(cmd *exec.Cmd, log string) (*Process, error) {
	p := &Process{cmd: cmd, log: log, done: make(chan struct{})}
	if log != "" {
		out, err := os.Create(log) //nolint:gosec // it is in the tool's own directory
		if err != nil {
			return nil, err
		}
		defer out.Close()
		cmd.Stdout, cmd.Stderr = out, out
	}
	ownGroup(cmd)
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = cmd.Wait()               // how it ended does not matter
		killGroup(cmd.Process, true) // whom it has left
		close(p.done)
	}()
	return p, nil
}

// PID returns the process's id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Ended returns whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Output returns the last of what the process has written.
func (p *Process) Output() string {
	const most = 4096
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(text[max(0, len(text)-most):]))
}

// Await waits until ready returns no error, at most for some time.
func (p *Process) Await(ctx context.Context, most time.Duration, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || p.Ended() {
			return fmt.Errorf("it does not answer: %w: %s", err, p.Output())
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// stopTimeout is what a process is given to end by itself.
const stopTimeout = 5 * time.Second

// Stop ends the process and its descendants and waits for it.
func (p *Process) Stop() {
	if p.Ended() {
		return
	}
	killGroup(p.cmd.Process, false)
	select {
	case <-p.done:
	case <-time.After(stopTimeout):
		p.Kill()
	}
}

// Kill ends them at once.
func (p *Process) Kill() {
	killGroup(p.cmd.Process, true)
	<-p.done
}
