package canned

import (
	"errors"
	"net"
	"syscall"
)

// setBacklog sets how many connections wait at a listener to be accepted.
func setBacklog(ln net.Listener, n int) error {
	tcp, ok := ln.(*net.TCPListener)
	if !ok {
		return errors.ErrUnsupported
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = syscall.Listen(int(fd), n) })
	return errors.Join(err, failed)
}
