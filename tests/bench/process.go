package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"
)

// process is a child process, and whom it has started itself.
type process struct {
	cmd      *exec.Cmd
	watchdog *watchdog     // may be nil
	done     chan struct{} // closed when it has ended
	log      tail

	mu sync.Mutex
	// over says that the process is reaped, or is about to be: its id may be
	// another's from then on.
	over bool
}

// startProcess starts a command. Its output is kept in part, for messages,
// where it goes nowhere else. With a watchdog it does not outlive this process;
// without, it must end when its input does.
func startProcess(cmd *exec.Cmd, w *watchdog) (*process, error) {
	p := &process{cmd: cmd, watchdog: w, done: make(chan struct{})}
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
	w.watch(p.pid())
	go p.reap()
	return p, nil
}

// reap waits for the process to end, and ends its descendants with it. These
// are signalled before the process is reaped: as long as it is not, no other
// group can have its id.
func (p *process) reap() {
	awaitExit(p.cmd.Process)
	p.mu.Lock()
	endGroup(p.cmd.Process)
	p.watchdog.forget(p.pid())
	p.over = true
	p.mu.Unlock()
	_ = p.cmd.Wait() // how it ended does not matter
	close(p.done)
}

// signal asks the process and its descendants to end, or kills them.
func (p *process) signal(now bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over {
		killGroup(p.cmd.Process, now)
	}
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
	p.signal(false)
	if !p.endsWithin(stopTimeout) {
		p.signal(true)
		<-p.done
	}
}

// endsWithin waits for the process to end, and tells whether it has.
func (p *process) endsWithin(d time.Duration) bool {
	select {
	case <-p.done:
		return true
	case <-time.After(d):
		return false
	}
}

// selfCommand makes a command of this program with an argument.
func selfCommand(arg string) (*exec.Cmd, error) {
	self, err := executable(os.Executable, os.Args[0])
	if err != nil {
		return nil, err
	}
	return exec.Command(self, arg), nil //nolint:gosec // it is this program
}

// executable returns the file of this program: what the system says, or what
// the program was called by, for Linux cannot say without /proc.
func executable(ask func() (string, error), calledBy string) (string, error) {
	if file, err := ask(); err == nil {
		return file, nil
	}
	file, err := exec.LookPath(calledBy)
	if err != nil {
		return "", err
	}
	return filepath.Abs(file)
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
