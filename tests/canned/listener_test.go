package canned

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// TestListenerFaults goes through the ways in which an engine takes no
// connections, and back.
func TestListenerFaults(t *testing.T) {
	e, err := Start("e")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Kill)
	dial := func() error {
		conn, err := net.DialTimeout("tcp", e.Addr(), 300*time.Millisecond)
		if err == nil {
			conn.Close()
		}
		return err
	}
	for range 2 {
		e.Refuse()
		if err := dial(); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("while it refuses: %v", err)
		}
		if err := e.Accept(); err != nil {
			t.Fatal(err)
		}
		if err := dial(); err != nil {
			t.Errorf("after it refused: %v", err)
		}
		if err := e.Block(); errors.Is(err, errors.ErrUnsupported) {
			t.Skip("a full queue does not let connections hang here")
		} else if err != nil {
			t.Fatal(err)
		}
		var timeout net.Error
		if err := dial(); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("while connections hang: %v", err)
		}
		if err := e.Accept(); err != nil {
			t.Fatal(err)
		}
		if err := dial(); err != nil {
			t.Errorf("after connections hung: %v", err)
		}
	}
}

// TestServersListenOnPortsOfTheirProcess takes many ports: all are of one share,
// whose own port is taken.
func TestServersListenOnPortsOfTheirProcess(t *testing.T) {
	shareOf := func(ln net.Listener) int { return (ln.Addr().(*net.TCPAddr).Port - firstPort) / shareSize }
	own := -1
	for range 50 {
		ln, err := Listen()
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		if share().held == nil {
			t.Skip("as many processes as there are shares")
		}
		if own < 0 {
			own = shareOf(ln)
		}
		if got := shareOf(ln); got != own {
			t.Errorf("a port of share %d, want %d", got, own)
		}
	}
	runtime.GC() // which closes what nobody holds
	if ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", firstPort-shares+own)); err == nil {
		ln.Close()
		t.Error("the share is there for another process")
	}
}
