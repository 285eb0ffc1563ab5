package zmtp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

const (
	flagMore    = 1 << 0
	flagLong    = 1 << 1
	flagCommand = 1 << 2

	maxShort   = 255      // bytes of a short frame
	maxCommand = 8 << 10  // bytes of a command, READY with its metadata included
	growBytes  = 64 << 10 // read at once, so that memory follows what arrives, not what is announced
)

// LargeMessage is the size in bytes above which a message needs room: see [Conn.Room].
const LargeMessage = 1 << 20

// Message is the frames of one message.
type Message [][]byte

// Size is the number of bytes in all frames.
func (m Message) Size() (n int) {
	for _, f := range m {
		n += len(f)
	}
	return n
}

type header struct {
	more, command bool
	size          uint64
}

func (c *Conn) header() (header, error) {
	var b [9]byte
	if _, err := io.ReadFull(c.r, b[:2]); err != nil {
		return header{}, err
	}
	flags := b[0]
	h := header{more: flags&flagMore != 0, command: flags&flagCommand != 0, size: uint64(b[1])}
	if flags&^(flagMore|flagLong|flagCommand) != 0 || h.more && h.command {
		return header{}, fmt.Errorf("the peer sent a frame with the invalid flags %#02x", flags)
	}
	if flags&flagLong != 0 {
		if _, err := io.ReadFull(c.r, b[2:]); err != nil {
			return header{}, err
		}
		h.size = binary.BigEndian.Uint64(b[1:])
	}
	if h.command && h.size > maxCommand {
		return header{}, fmt.Errorf("the peer sent a command of %d bytes, %d are allowed", h.size, maxCommand)
	}
	return h, nil
}

// Recv reads the next message. It answers the peer's heartbeats on the way. After an error, the
// connection is of no more use.
func (c *Conn) Recv() (m Message, err error) {
	for {
		h, err := c.header()
		if err != nil {
			return nil, c.broken(err)
		}
		if h.command { // libzmq may send a PING between the frames of a message
			if err := c.handle(h); err != nil {
				return nil, c.broken(err)
			}
			continue
		}
		f, err := c.frame(m, h.size)
		if err != nil {
			return nil, c.broken(err)
		}
		if m = append(m, f); !h.more {
			return m, nil
		}
	}
}

// frame reads the content of one more frame of a message, within the bounds of a message.
func (c *Conn) frame(m Message, size uint64) (b []byte, err error) {
	had := m.Size()
	if len(m) == maxFrames {
		return nil, fmt.Errorf("the peer sent a message of more than %d frames", maxFrames)
	}
	if size > uint64(c.maxBytes-had) {
		return nil, fmt.Errorf("the peer sent a message of more than %d bytes: one frame has %d", c.maxBytes, size)
	}
	if total := had + int(size); total > LargeMessage && size > 0 && c.Room != nil {
		if err := c.Room(total); err != nil {
			return nil, err
		}
	}
	for left := int(size); left > 0; {
		n := min(left, growBytes)
		b = slices.Grow(b, n)[:len(b)+n]
		if _, err := io.ReadFull(c.r, b[len(b)-n:]); err != nil {
			return nil, err
		}
		left -= n
	}
	return b, nil
}

// readCommand reads a command's name and body.
func (c *Conn) readCommand(h header) (name, body []byte, err error) {
	b := make([]byte, h.size)
	if _, err := io.ReadFull(c.r, b); err != nil {
		return nil, nil, err
	}
	name, body, ok := cut(b, 1)
	if !ok || len(name) == 0 {
		return nil, nil, errors.New("the peer sent a command without a name")
	}
	return name, body, nil
}

// handle reads a command behind the handshake. It ignores those that it does not know, as the
// specification demands of 3.1 peers.
func (c *Conn) handle(h header) error {
	name, body, err := c.readCommand(h)
	if err != nil {
		return err
	}
	switch string(name) {
	case "PING": // 2 bytes of time to live and up to 16 of context, which the PONG repeats
		if len(body) < 2 {
			return errors.New("the peer sent a PING without a time to live")
		}
		return c.command("PONG", body[2:min(len(body), 2+16)])
	case "ERROR":
		return peerError(body)
	}
	return nil
}

func appendFrame(b []byte, flags byte, parts ...[]byte) []byte {
	size := 0
	for _, p := range parts {
		size += len(p)
	}
	if size > maxShort {
		b = append(b, flags|flagLong)
		b = binary.BigEndian.AppendUint64(b, uint64(size))
	} else {
		b = append(b, flags, byte(size))
	}
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}
