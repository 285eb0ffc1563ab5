package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// keepAlive finds a dead TCP peer in about half a minute. It is the only means against peers
// of ZMTP 3.0, which do not know PING.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// dialTimeout is the longest that a connection may take, without the handshake.
const dialTimeout = 5 * time.Second

// CheckEndpoint returns an error that says what is wrong with an endpoint, or nil. Only an
// endpoint to listen on may have the host "*".
func CheckEndpoint(endpoint string, listen bool) error {
	_, _, err := split(endpoint, listen)
	return err
}

// split returns the network and the address of an endpoint, as package net names them.
func split(endpoint string, listen bool) (network, address string, err error) {
	scheme, rest, ok := strings.Cut(endpoint, "://")
	switch {
	case !ok:
		return "", "", fmt.Errorf("endpoint %q: it must begin with tcp:// or ipc://", endpoint)
	case scheme == "ipc" && rest == "":
		return "", "", fmt.Errorf("endpoint %q: the path is missing", endpoint)
	case scheme == "ipc":
		return "unix", rest, nil
	case scheme != "tcp":
		return "", "", fmt.Errorf("endpoint %q: transport %q is not supported, only tcp and ipc are", endpoint, scheme)
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return "", "", fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 && !listen {
		return "", "", fmt.Errorf("endpoint %q: %q is not a port", endpoint, port)
	}
	switch {
	case listen && host == "*":
		host = ""
	case host == "" || host == "*":
		return "", "", fmt.Errorf("endpoint %q: the host is missing", endpoint)
	}
	return "tcp", net.JoinHostPort(host, port), nil
}

// DialNet connects to an endpoint, without a handshake.
func DialNet(ctx context.Context, endpoint string) (net.Conn, error) {
	network, address, err := split(endpoint, false)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{Timeout: dialTimeout, KeepAliveConfig: keepAlive}
	nc, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", endpoint, err)
	}
	return nc, nil
}

// Listen binds an endpoint. The host "*" stands for all addresses. Accepted connections still
// need [New].
func Listen(ctx context.Context, endpoint string) (net.Listener, error) {
	network, address, err := split(endpoint, true)
	if err != nil {
		return nil, err
	}
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	l, err := lc.Listen(ctx, network, address)
	if network == "unix" && errors.Is(err, syscall.EADDRINUSE) && removeStale(ctx, address) {
		l, err = lc.Listen(ctx, network, address)
	}
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", endpoint, err)
	}
	return l, nil
}

// removeStale removes the socket file of a process that has ended. It returns whether it did.
func removeStale(ctx context.Context, path string) bool {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		_ = nc.Close()
		return false
	}
	return errors.Is(err, syscall.ECONNREFUSED) && os.Remove(path) == nil
}
