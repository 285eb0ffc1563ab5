package publisher

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
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
	if m, err := w.read(); err != nil || !m.command || !bytes.HasPrefix(m.frames[0], []byte("\x05READY")) {
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

// read reads the next command or message. It answers a PING with a PONG that has its context.
func (w *wire) read() (incoming, error) {
	var m incoming
	for {
		flags, err := w.r.ReadByte()
		if err != nil {
			return m, err
		}
		size := make([]byte, 8)
		short := size[7:]
		if flags&flagLong != 0 {
			short = size
		}
		if _, err = io.ReadFull(w.r, short); err != nil {
			return m, err
		}
		body := make([]byte, binary.BigEndian.Uint64(size))
		if _, err := io.ReadFull(w.r, body); err != nil {
			return m, err
		}
		if ping, ok := bytes.CutPrefix(body, []byte("\x04PING")); ok && flags&flagCommand != 0 && len(ping) >= 2 {
			if err := w.write(appendFrame(nil, flagCommand, append([]byte("\x04PONG"), ping[2:]...))); err != nil {
				return m, err
			}
			continue
		}
		m.command = flags&flagCommand != 0
		m.frames = append(m.frames, body)
		if flags&flagMore == 0 {
			return m, nil
		}
	}
}

func (w *wire) write(b []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.conn.Write(b)
	return err
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
