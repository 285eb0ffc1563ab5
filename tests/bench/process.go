package main

import (
	"bytes"
	"os"
	"os/exec"
	"time"
)

// process is a child process, and whom it has started itself.
type process struct {
	cmd  *exec.Cmd
	log  string        // the file of its output; empty: this process's
	done chan struct{} // closed when it has ended
}

// startProcess starts a command. Its output goes to a file, if one is named.
func startProcess(cmd *exec.Cmd, log string) (*process, error) {
	p := &process{cmd: cmd, log: log, done: make(chan struct{})}
	if log != "" {
		out, err := os.Create(log) //nolint:gosec // it is in the bench's own directory
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

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// output returns the last of what the process has written.
func (p *process) output() string {
	const most = 4096
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(text[max(0, len(text)-most):]))
}

// stopTimeout is what a process is given to end by itself.
const stopTimeout = 5 * time.Second

// stop ends the process and its descendants and waits for it.
func (p *process) stop() {
	if p.ended() {
		return
	}
	killGroup(p.cmd.Process, false)
	select {
	case <-p.done:
	case <-time.After(stopTimeout):
		killGroup(p.cmd.Process, true)
		<-p.done
	}
}
