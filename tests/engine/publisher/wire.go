package publisher

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Flags of a ZMTP frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// The most that a peer may send: subscriptions and requests for a replay are short.
const (
	maxFrame  = 1 << 16
	maxFrames = 8
)

// handshakeTime is how long a peer may take to greet.
const handshakeTime = 5 * time.Second

// greeting is ZMTP 3.1 with the NULL mechanism.
var greeting = append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1, 'N', 'U', 'L', 'L'}, make([]byte, 48)...)

var errGreeting = errors.New("peer does not speak ZMTP 3 with the NULL mechanism")

// wire is one ZMTP connection. One goroutine reads; any may write.
type wire struct {
	conn net.Conn
	r    *bufio.Reader
	mu   sync.Mutex // held while a message is written
}

// open exchanges greetings and READY commands over a new connection.
func open(conn net.Conn, socket string) (*wire, error) {
	w := &wire{conn: conn, r: bufio.NewReader(conn)}
	conn.SetDeadline(time.Now().Add(handshakeTime)) //nolint:errcheck // then the connection is closed
	ready := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00"), byte(len(socket)))
	ready = append(ready, socket...)
	if err := w.write(appendFrame(bytes.Clone(greeting), flagCommand, ready)); err != nil {
		return nil, err
	}
	theirs := make([]byte, len(greeting))
	if _, err := io.ReadFull(w.r, theirs); err != nil {
		return nil, err
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || !bytes.Equal(theirs[12:32], greeting[12:32]) {
		return nil, errGreeting
	}
	m, err := w.read()
	if err != nil {
		return nil, err
	}
	if !m.command || !bytes.HasPrefix(m.frames[0], []byte("\x05READY")) {
		return nil, errGreeting
	}
	conn.SetDeadline(time.Time{}) //nolint:errcheck // as above
	return w, nil
}

// incoming is what a peer sent: a command, or the frames of a message.
type incoming struct {
	command bool
	frames  [][]byte
}

func (w *wire) read() (incoming, error) {
	var m incoming
	for {
		flags, err := w.r.ReadByte()
		if err != nil {
			return m, err
		}
		size, err := w.size(flags&flagLong != 0)
		if err != nil {
			return m, err
		}
		if size > maxFrame || len(m.frames) == maxFrames {
			return m, fmt.Errorf("frame %d of %d bytes is too much", len(m.frames), size)
		}
		body := make([]byte, size)
		if _, err := io.ReadFull(w.r, body); err != nil {
			return m, err
		}
		m.command = flags&flagCommand != 0
		m.frames = append(m.frames, body)
		if flags&flagMore == 0 {
			return m, nil
		}
	}
}

func (w *wire) size(long bool) (uint64, error) {
	var b [8]byte
	n := 7
	if long {
		n = 0
	}
	_, err := io.ReadFull(w.r, b[n:])
	return binary.BigEndian.Uint64(b[:]), err
}

func (w *wire) write(b []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.conn.Write(b)
	return err
}

// answered answers a PING with a PONG that has its context, and says whether it did.
func (w *wire) answered(m incoming) bool {
	ping, ok := bytes.CutPrefix(m.frames[0], []byte("\x04PING"))
	if !m.command || !ok || len(ping) < 2 {
		return false
	}
	w.write(appendFrame(nil, flagCommand, append([]byte("\x04PONG"), ping[2:]...))) //nolint:errcheck // the reader notices
	return true
}

func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = append(b, flags|flagLong)
		b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}

// appendMessage appends a message of some frames.
func appendMessage(b []byte, frames ...[]byte) []byte {
	for i, f := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		b = appendFrame(b, flags, f)
	}
	return b
}
