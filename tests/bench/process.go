package main

import (
	"bytes"
	"os/exec"
	"sync"
	"time"
)

// process is a child process, and whom it has started itself.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	log  tail
}

// startProcess starts a command. Its output is kept in part, for messages,
// where it goes nowhere else.
func startProcess(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{})}
	if cmd.Stdout == nil {
		cmd.Stdout = &p.log
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &p.log
	}
	ownGroup(cmd)
	// Descendants may keep the output open.
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = cmd.Wait() // how it ended does not matter
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
func (p *process) output() string { return p.log.String() }

// stopTimeout is what a process is given to end by itself.
const stopTimeout = 5 * time.Second

// stop ends the process and its descendants and waits for it.
func (p *process) stop() {
	defer killGroup(p.pid(), true) // who of them has outlived it
	if p.ended() {
		return
	}
	killGroup(p.pid(), false)
	select {
	case <-p.done:
	case <-time.After(stopTimeout):
		killGroup(p.pid(), true)
		<-p.done
	}
}

// tail keeps the last bytes written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

// maxTail is how much a tail keeps, bytes.
const maxTail = 4096

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - maxTail; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

// String returns what is kept, from its first whole line on.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buf
	if len(b) == maxTail {
		_, b, _ = bytes.Cut(b, []byte("\n"))
	}
	return string(b)
}
