// Package peer is the other side of KV event sockets, for tests: a subscriber and a
// client of replays. It uses github.com/go-zeromq/zmq4's connections, so that it checks
// package publisher with code that shares nothing with it. It speaks ZMTP 3.0.
package peer

import (
	"encoding/binary"
	"errors"
	"net"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

// patience is how long a peer waits for a message or a greeting.
const patience = 5 * time.Second

// Message is one message as it came.
type Message struct {
	Topic   string
	Seq     uint64
	Payload []byte
}

// Conn is a connection to a PUB or a ROUTER socket.
type Conn struct {
	raw  net.Conn
	conn *zmq4.Conn
}

func open(addr string, typ zmq4.SocketType) (*Conn, error) {
	raw, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	raw.SetDeadline(time.Now().Add(patience)) //nolint:errcheck // then there is no greeting
	conn, err := zmq4.Open(raw, null.Security(), typ, nil, false, nil)
	if err != nil {
		raw.Close()
		return nil, err
	}
	raw.SetDeadline(time.Time{}) //nolint:errcheck // as above
	return &Conn{raw, conn}, nil
}

// Subscribe connects to a PUB socket at host:port, for the topics with a prefix.
func Subscribe(addr, prefix string) (*Conn, error) {
	c, err := open(addr, zmq4.Sub)
	if err != nil {
		return nil, err
	}
	if err := c.Send(append([]byte{1}, prefix...)); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Dealer connects to a ROUTER socket at host:port.
func Dealer(addr string) (*Conn, error) { return open(addr, zmq4.Dealer) }

// Send sends one message.
func (c *Conn) Send(frames ...[]byte) error { return c.conn.SendMsg(zmq4.NewMsgFrom(frames...)) }

// Frames returns the frames of the next message, waiting for it at most so long.
func (c *Conn) Frames(wait time.Duration) ([][]byte, error) {
	c.raw.SetReadDeadline(time.Now().Add(wait)) //nolint:errcheck // then it waits for longer
	m, err := c.conn.RecvMsg()
	return m.Frames, err
}

// Next returns the next message of a PUB socket.
func (c *Conn) Next() (Message, error) {
	f, err := c.Frames(patience)
	if err != nil {
		return Message{}, err
	}
	if len(f) != 3 || len(f[1]) != 8 {
		return Message{}, errors.New("message does not have three frames with a number in the second")
	}
	return Message{string(f[0]), binary.BigEndian.Uint64(f[1]), f[2]}, nil
}

// Replay asks a ROUTER socket for the batches from a number on. Each element has the
// frames of one message behind the empty one; the mark of the end is the last.
func (c *Conn) Replay(from uint64) ([][][]byte, error) {
	if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return nil, err
	}
	var out [][][]byte
	for {
		f, err := c.Frames(patience)
		if err != nil {
			return out, err
		}
		if len(f) < 3 || len(f[0]) != 0 {
			return out, errors.New("reply does not begin with an empty frame")
		}
		out = append(out, f[1:])
		if seq := f[len(f)-2]; len(seq) == 8 && binary.BigEndian.Uint64(seq) == 1<<64-1 {
			return out, nil
		}
	}
}

// Close closes the connection.
func (c *Conn) Close() { c.raw.Close() }
