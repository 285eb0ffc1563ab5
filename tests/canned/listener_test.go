package canned

import (
	"errors"
	"net"
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
