package zmtp

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// keepAlive finds a dead TCP peer in about half a minute. It is the only means against peers
// of ZMTP 3.0, which do not know PING.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// dialTimeout is the longest that a connection may take, without the handshake.
const dialTimeout = 5 * time.Second

// CheckEndpoint returns an error that says what is wrong with an endpoint, or nil.
func CheckEndpoint(endpoint string) error {
	_, _, err := split(endpoint)
	return err
}

// split returns the network and the address of an endpoint, as package net names them.
func split(endpoint string) (network, address string, err error) {
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
	if err != nil || n == 0 {
		return "", "", fmt.Errorf("endpoint %q: %q is not a port", endpoint, port)
	}
	if host == "" || host == "*" {
		return "", "", fmt.Errorf("endpoint %q: the host is missing", endpoint)
	}
	return "tcp", rest, nil
}

// Dial connects to an endpoint, without a handshake.
func Dial(ctx context.Context, endpoint string) (net.Conn, error) {
	network, address, err := split(endpoint)
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
