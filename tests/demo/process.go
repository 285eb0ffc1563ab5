package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// process is another router.
type process struct {
	listen string // host:port
	cmd    *exec.Cmd
	done   chan struct{} // closed when it has ended
	log    tail
}

// How long another router may take to listen, and to end.
const (
	patience = 30 * time.Second
	farewell = 3 * time.Second
)

// startProcess starts another router with a shell. The command has placeholders, and
// the same values as variables of its environment:
//
//	{listen}     LISTEN     the host:port to listen on
//	{host}       HOST       its host
//	{port}       PORT       its port
//	{upstreams}  UPSTREAMS  the engines' base URLs, with spaces between them
//	{addresses}  ADDRESSES  the engines' host:port, with spaces between them
func startProcess(command, listen string, addrs []string) (*process, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, err
	}
	env := os.Environ()
	for _, v := range []struct{ name, value string }{
		{"listen", listen},
		{"host", host},
		{"port", port},
		{"upstreams", "http://" + strings.Join(addrs, " http://")},
		{"addresses", strings.Join(addrs, " ")},
	} {
		command = strings.ReplaceAll(command, "{"+v.name+"}", v.value)
		env = append(env, strings.ToUpper(v.name)+"="+v.value)
	}
	p := &process{listen: listen, done: make(chan struct{})}
	p.cmd = exec.Command("/bin/sh", "-c", command) //nolint:gosec // the user's
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr, p.cmd.WaitDelay = env, &p.log, &p.log, time.Second
	ownGroup(p.cmd)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.done)
		p.cmd.Wait() //nolint:errcheck // what it wrote says more
	}()
	return p, nil
}

// await waits until the router listens.
func (p *process) await() error {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if conn, err := net.Dial("tcp", p.listen); err == nil {
			return conn.Close()
		}
		select {
		case <-p.done:
			return fmt.Errorf("the command has ended: %s", &p.log)
		default:
		}
	}
	return fmt.Errorf("the command does not listen on %s after %v: %s", p.listen, patience, &p.log)
}

// stop ends the router and the processes that it started, unless it has ended.
func (p *process) stop() {
	for _, now := range []bool{false, true} {
		select {
		case <-p.done:
			return
		default:
		}
		endGroup(p.cmd, now)
		select {
		case <-p.done:
		case <-time.After(farewell):
		}
	}
}

// tail keeps the last of what is written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

// tailSize is how much a tail keeps, in bytes.
const tailSize = 2048

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - tailSize; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

// String returns what is kept.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
