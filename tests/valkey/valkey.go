// Package valkey runs a server for tests of several routers. It is a Valkey or Redis server if this
// machine has one. Else it is one in this process, which cannot be killed or stopped.
package valkey

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// Server is a server on loopback.
type Server struct {
	Addr string
	// Real says that it is a process.
	Real bool

	program, dir string
	args         []string
	cmd          *exec.Cmd
	inside       *miniredis.Miniredis
}

// Start starts a server that keeps nothing on disk. Options are those of its configuration file, such
// as "maxmemory", "1mb".
func Start(options ...string) (*Server, error) {
	s := new(Server)
	for _, name := range []string{"valkey-server", "redis-server"} {
		if path, err := exec.LookPath(name); err == nil {
			s.program, s.Real = path, true
			break
		}
	}
	var err error
	if !s.Real {
		s.inside = miniredis.NewMiniRedis()
		err = s.inside.Start()
		s.Addr = s.inside.Addr()
		return s, err
	}
	if s.Addr, err = canned.FreeAddr(); err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(s.Addr) //nolint:errcheck // FreeAddr gives one
	if s.dir, err = os.MkdirTemp("", "kvrouter-valkey-"); err != nil {
		return nil, err
	}
	s.args = []string{"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", s.dir}
	for i := 0; i+1 < len(options); i += 2 {
		s.args = append(s.args, "--"+options[i], options[i+1])
	}
	return s, s.Restart()
}

// URL returns the address for the option share.
func (s *Server) URL() string { return "redis://" + s.Addr + "/0" }

// Restart starts a server that was killed, without what it held.
func (s *Server) Restart() error {
	s.cmd = exec.Command(s.program, s.args...) //nolint:gosec // found above
	if err := s.cmd.Start(); err != nil {
		return err
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if answer, err := s.Ask("PING"); err == nil && answer != "" {
			return nil
		} else if time.Now().After(end) {
			return fmt.Errorf("%s does not answer: %w", s.program, err)
		}
	}
}

// Demote makes the server refuse to write, as after a failover.
func (s *Server) Demote() error {
	if s.inside != nil {
		s.inside.SetError("READONLY You can't write against a read only replica.")
		return nil
	}
	_, err := s.Ask("REPLICAOF", "127.0.0.1", "1")
	return err
}

// Ask sends one command, and returns the beginning of the answer.
func (s *Server) Ask(words ...string) (string, error) { return s.AskAs("", words...) }

// AskAs is Ask with a password.
func (s *Server) AskAs(password string, words ...string) (string, error) {
	conn, err := new(net.Dialer).DialContext(context.Background(), "tcp", s.Addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err = conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return "", err
	}
	if password != "" {
		if _, err = conn.Write(command([]string{"AUTH", password})); err != nil {
			return "", err
		}
		if _, err = conn.Read(make([]byte, 100)); err != nil {
			return "", err
		}
	}
	if _, err = conn.Write(command(words)); err != nil {
		return "", err
	}
	b := make([]byte, 16<<10)
	n, err := conn.Read(b)
	return string(b[:n]), err
}

func command(words []string) []byte {
	b := fmt.Appendf(nil, "*%d\r\n", len(words))
	for _, w := range words {
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(w), w)
	}
	return b
}

// Signal sends a signal to the process.
func (s *Server) Signal(what syscall.Signal) error { return s.cmd.Process.Signal(what) }

// Kill kills the process.
func (s *Server) Kill() {
	_ = s.Signal(syscall.SIGKILL) //nolint:errcheck // it may be over
	_ = s.cmd.Wait()              //nolint:errcheck // the same
}

// Stop ends the server.
func (s *Server) Stop() {
	if s.inside != nil {
		s.inside.Close()
		return
	}
	s.Kill()
	_ = os.RemoveAll(s.dir) //nolint:errcheck,gosec // a temporary directory
}
