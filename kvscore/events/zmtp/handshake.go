package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// The greeting: 10 bytes of signature, 2 of version, 20 of mechanism, 1 as-server, 31 unused.
const (
	greetingSize  = 64
	versionAt     = 10
	mechanismAt   = 12
	mechanismSize = 20
	fillerAt      = mechanismAt + mechanismSize
)

// peers are the socket types that each socket may talk to, by the specification.
var peers = map[Socket][]string{
	Sub:    {"PUB", "XPUB"},
	Dealer: {"ROUTER", "REP", "DEALER"},
}

func greeting() []byte {
	g := make([]byte, greetingSize)
	g[0], g[9] = 0xff, 0x7f
	g[versionAt], g[versionAt+1] = 3, 1
	copy(g[mechanismAt:], "NULL")
	return g
}

func (c *Conn) handshake() error {
	if err := c.writeRaw(greeting()); err != nil {
		return fmt.Errorf("sending the greeting: %w", err)
	}
	if err := c.readGreeting(); err != nil {
		return err
	}
	if err := c.command("READY", property("Socket-Type", string(c.socket))); err != nil {
		return fmt.Errorf("sending READY: %w", err)
	}
	h, err := c.header()
	if err != nil {
		return fmt.Errorf("reading the peer's READY: %w", err)
	}
	if !h.command {
		return errors.New("the peer sent a message before READY")
	}
	name, body, err := c.readCommand(h)
	if err != nil {
		return fmt.Errorf("reading the peer's READY: %w", err)
	}
	switch string(name) {
	case "READY":
		return c.checkReady(body)
	case "ERROR":
		return peerError(body)
	}
	return fmt.Errorf("the peer sent the command %.20q where READY belongs", name)
}

// readGreeting reads the version before the rest, because peers of ZMTP 2 and older send a
// shorter greeting.
func (c *Conn) readGreeting() error {
	var g [greetingSize]byte
	if _, err := io.ReadFull(c.r, g[:versionAt+1]); err != nil {
		return fmt.Errorf("reading the peer's greeting: %w", err)
	}
	if g[0] != 0xff || g[9] != 0x7f {
		return fmt.Errorf("the peer does not talk ZMTP 3: its greeting begins with %q", g[:versionAt])
	}
	if g[versionAt] < 3 {
		return fmt.Errorf("the peer talks ZMTP version %d, at least 3.0 is needed", g[versionAt])
	}
	if _, err := io.ReadFull(c.r, g[versionAt+1:]); err != nil {
		return fmt.Errorf("reading the peer's greeting: %w", err)
	}
	c.major, c.minor = g[versionAt], g[versionAt+1]
	if m := bytes.TrimRight(g[mechanismAt:fillerAt], "\x00"); string(m) != "NULL" {
		return fmt.Errorf("the peer demands the security mechanism %q, only NULL is supported", m)
	}
	return nil
}

func property(name, value string) []byte {
	b := append([]byte{byte(len(name))}, name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

func (c *Conn) checkReady(body []byte) error {
	kind := ""
	for len(body) > 0 {
		name, rest, ok := cut(body, 1)
		if !ok || len(name) == 0 {
			return errors.New("the peer's READY has a broken property name")
		}
		value, rest, ok := cut(rest, 4)
		if !ok {
			return fmt.Errorf("the peer's READY has a broken value of the property %.20q", name)
		}
		if bytes.EqualFold(name, []byte("Socket-Type")) {
			kind = string(value)
		}
		body = rest
	}
	if slices.Contains(peers[c.socket], kind) {
		return nil
	}
	return fmt.Errorf("the peer is a %.20q socket, a %s socket cannot talk to it", kind, c.socket)
}

// cut splits b behind a field whose length is in its first bytes, 1 or 4 of them.
func cut(b []byte, lengthSize int) (field, rest []byte, ok bool) {
	if len(b) < lengthSize {
		return nil, nil, false
	}
	n := uint64(b[0])
	if lengthSize == 4 {
		n = uint64(binary.BigEndian.Uint32(b))
	}
	b = b[lengthSize:]
	if n > uint64(len(b)) {
		return nil, nil, false
	}
	return b[:n], b[n:], true
}

func peerError(body []byte) error {
	reason, _, _ := cut(body, 1)
	return fmt.Errorf("the peer refused the connection: %.100q", reason)
}
