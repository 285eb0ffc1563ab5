//go:build !linux

package canned

import (
	"errors"
	"net"
)

// setBacklog is not known to work here on a listener that listens.
func setBacklog(net.Listener, int) error { return errors.ErrUnsupported }
