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

// TestServersListenOnPortsOfTheirProcess takes many ports, and gives them back at
// once: all are of one share, whose own port is taken, and none comes twice.
func TestServersListenOnPortsOfTheirProcess(t *testing.T) {
	if share().held == nil {
		t.Skip("as many processes as there are shares")
	}
	seen := make(map[int]bool)
	for range shareSize / 2 {
		ln, err := Listen()
		if err != nil {
			t.Fatal(err)
		}
		ln.Close()
		port := ln.Addr().(*net.TCPAddr).Port
		if port < share().first || port >= share().first+shareSize || seen[port] {
			t.Errorf("port %d, of those from %d on; there before: %v", port, share().first, seen[port])
		}
		seen[port] = true
	}
	runtime.GC() // which closes what nobody holds
	own := firstPort - shares + (share().first-firstPort)/shareSize
	if ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", own)); err == nil {
		ln.Close()
		t.Error("the share is there for another process")
	}
}
