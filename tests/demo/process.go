package main

import (
	"errors"
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
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	log  tail
}

// How long another router may take to listen, and to end.
const (
	patience = 30 * time.Second
	farewell = 3 * time.Second
)

// startProcess starts another router with a shell and waits until it listens. The
// command has placeholders, and the same values as variables of its environment:
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
	values := []string{
		"listen", listen, "host", host, "port", port,
		"upstreams", "http://" + strings.Join(addrs, " http://"), "addresses", strings.Join(addrs, " "),
	}
	var pairs []string
	env := os.Environ()
	for i := 0; i < len(values); i += 2 {
		pairs = append(pairs, "{"+values[i]+"}", values[i+1])
		env = append(env, strings.ToUpper(values[i])+"="+values[i+1])
	}
	p := &process{done: make(chan struct{})}
	p.cmd = exec.Command("/bin/sh", "-c", strings.NewReplacer(pairs...).Replace(command)) //nolint:gosec // the user's
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr, p.cmd.WaitDelay = env, &p.log, &p.log, time.Second
	ownGroup(p.cmd)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.done)
		p.cmd.Wait() //nolint:errcheck // await says it
	}()
	if err := p.await(listen); err != nil {
		p.stop()
		return nil, fmt.Errorf("%w; its output: %s", err, &p.log)
	}
	return p, nil
}

// await waits until the router listens.
func (p *process) await(addr string) error {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if conn, err := net.Dial("tcp", addr); err == nil {
			return conn.Close()
		}
		select {
		case <-p.done:
			return errors.New("the command has ended")
		default:
		}
	}
	return fmt.Errorf("the command does not listen on %s after %v", addr, patience)
}

// stop ends the router and the processes that it started.
func (p *process) stop() {
	endGroup(p.cmd, false)
	select {
	case <-p.done:
	case <-time.After(farewell):
	}
	endGroup(p.cmd, true)
	<-p.done
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
