package zmtp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Socket is the type of this side's socket.
type Socket string

const (
	// Sub receives what a PUB or XPUB socket publishes.
	Sub Socket = "SUB"
	// Dealer talks to a ROUTER socket.
	Dealer Socket = "DEALER"
)

// ErrSilent means that the peer has sent nothing for too long.
var ErrSilent = errors.New("the peer is silent")

// writeTimeout is how long the peer may leave a write waiting. All that this side writes is
// small, so only a peer that does not read at all takes that long.
const writeTimeout = 5 * time.Second

const (
	maxFrames        = 16               // of a message
	handshakeTimeout = 5 * time.Second  // until both sides are ready
	pingAfter        = 5 * time.Second  // the silence after which a peer of ZMTP 3.1 gets a PING
	deadAfter        = 15 * time.Second // the silence after the PING that ends the connection
)

// Conn is one connection to one peer. One goroutine at a time may call [Conn.Recv]. All other
// methods may be called at any time by any goroutine.
type Conn struct {
	nc           net.Conn
	endpoint     string
	socket       Socket
	maxBytes     int
	major, minor byte // of the peer's protocol
	ready        bool // the handshake is over
	r            *bufio.Reader

	// Room is called before the memory for a frame is taken with which a message exceeds
	// LargeMessage. It gets the message's size so far, and ends the connection with its error. Set it
	// before Recv; nil allows all.
	Room func(bytes int) error

	write sync.Mutex // keeps frames of two writers apart
}

// New shakes hands over an open connection, see [Dial], as a socket of this type. maxBytes bounds a
// message, all frames together. New owns nc, and closes it if it returns an error. If ctx ends first, New
// fails at once; later the connection does not depend on ctx. Errors name the endpoint.
func New(ctx context.Context, nc net.Conn, endpoint string, socket Socket, maxBytes int) (*Conn, error) {
	c := &Conn{nc: nc, endpoint: endpoint, socket: socket, maxBytes: maxBytes}
	c.r = bufio.NewReaderSize((*patient)(c), 64<<10)
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(handshakeTimeout))
	err := c.handshake()
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = nc.Close()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("handshake with %s: %w", endpoint, err)
	}
	_ = nc.SetDeadline(time.Time{})
	c.ready = true
	return c, nil
}

// Close ends the connection and a call of [Conn.Recv].
func (c *Conn) Close() error { return c.nc.Close() }

// heartbeats returns whether the peer must know PING and SUBSCRIBE commands.
func (c *Conn) heartbeats() bool { return c.major > 3 || c.minor >= 1 }

// Subscribe asks the publisher for the messages whose first frame begins with topic.
func (c *Conn) Subscribe(topic string) error {
	var err error
	if c.heartbeats() {
		err = c.command("SUBSCRIBE", []byte(topic))
	} else {
		err = c.writeRaw(appendFrame(nil, 0, []byte{1}, []byte(topic)))
	}
	if err != nil {
		return fmt.Errorf("subscribing at %s: %w", c.endpoint, err)
	}
	return nil
}

// Send sends a message of the given frames.
func (c *Conn) Send(frames ...[]byte) error {
	var b []byte
	for i, f := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		b = appendFrame(b, flags, f)
	}
	if err := c.writeRaw(b); err != nil {
		return fmt.Errorf("sending to %s: %w", c.endpoint, err)
	}
	return nil
}

func (c *Conn) command(name string, body []byte) error {
	return c.writeRaw(appendFrame(nil, flagCommand, []byte{byte(len(name))}, []byte(name), body))
}

// writeRaw writes bytes. Within the handshake, its deadline holds.
func (c *Conn) writeRaw(b []byte) error {
	c.write.Lock()
	defer c.write.Unlock()
	if c.ready {
		_ = c.nc.SetWriteDeadline(time.Now().Add(writeTimeout))
	}
	_, err := c.nc.Write(b)
	return err
}

func (c *Conn) broken(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%s closed the connection: %w", c.endpoint, err)
	}
	return fmt.Errorf("receiving from %s: %w", c.endpoint, err)
}

// patient reads from the connection and keeps watch over silence while it waits.
type patient Conn

func (p *patient) Read(b []byte) (int, error) {
	c := (*Conn)(p)
	if !c.ready || !c.heartbeats() { // then the handshake's deadline or TCP's keep-alive watches
		return c.nc.Read(b)
	}
	wait, pinged := pingAfter, false
	for {
		_ = c.nc.SetReadDeadline(time.Now().Add(wait))
		n, err := c.nc.Read(b)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		if pinged {
			return 0, fmt.Errorf("%w: nothing came for %v", ErrSilent, wait)
		}
		// A time to live of 0 asks the peer for no deadline of its own: this side sends
		// nothing while messages arrive.
		if err := c.command("PING", []byte{0, 0}); err != nil {
			return 0, fmt.Errorf("sending a heartbeat: %w", err)
		}
		wait, pinged = deadAfter, true
	}
}
