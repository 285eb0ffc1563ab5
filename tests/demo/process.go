package main

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"time"
)

// process is another router.
type process struct {
	listen string // host:port
	cmd    *exec.Cmd
	done   chan struct{} // closed when it has ended
	log    bytes.Buffer  // to be read when it has ended
}

// patience is how long another router may take to start.
const patience = 4 * time.Minute

// startProcess starts another router with a shell, which gives its place to the command. The
// placeholders of the command are those of -with.
func startProcess(command, listen string, addrs []string) (*process, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, err
	}
	command = strings.NewReplacer("{listen}", listen, "{host}", host, "{port}", port,
		"{upstreams}", "http://"+strings.Join(addrs, " http://")).Replace(command)
	p := &process{listen: listen, done: make(chan struct{})}
	p.cmd = exec.Command("/bin/sh", "-c", "exec "+command) //nolint:gosec // the user's
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.WaitDelay = &p.log, &p.log, time.Second
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.done)
		p.cmd.Wait() //nolint:errcheck // what it wrote says more
	}()
	return p, nil
}

// await waits until the router knows its engines: it lists their models.
func (p *process) await() error {
	client := http.Client{Timeout: time.Second}
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if resp, err := client.Get("http://" + p.listen + "/v1/models"); err == nil { //nolint:noctx // on loopback
			_ = resp.Body.Close() //nolint:errcheck // nothing is read
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-p.done:
			return fmt.Errorf("the command has ended: %.2000s", p.log.String())
		default:
		}
	}
	return fmt.Errorf("the command lists no models at %s after %v", p.listen, patience)
}

func (p *process) stop() {
	p.cmd.Process.Kill() //nolint:errcheck,gosec // it may have ended
	<-p.done
}
