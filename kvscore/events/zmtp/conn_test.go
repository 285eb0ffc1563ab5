package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// The bytes of this file are written by hand from the specification, so that the tests do not
// check the client against itself.

func peerGreeting(minor byte, mechanism string) []byte {
	g := append([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"), minor)
	g = append(g, mechanism...)
	return append(g, make([]byte, 64-len(g))...)
}

func peerReady(socket string) []byte {
	body := "\x05READY\x0bSocket-Type\x00\x00\x00" + string(rune(len(socket))) + socket + "\x08Identity\x00\x00\x00\x00"
	return append([]byte{4, byte(len(body))}, body...)
}

func peerHandshake(minor byte, socket string) []byte {
	return append(peerGreeting(minor, "NULL"), peerReady(socket)...)
}

// frames encodes a message with short headers.
func frames(fs ...string) []byte {
	var b []byte
	for i, f := range fs {
		flag := byte(1)
		if i == len(fs)-1 {
			flag = 0
		}
		b = append(append(b, flag, byte(len(f))), f...)
	}
	return b
}

// stub is a connection whose peer has sent all that it will send.
type stub struct {
	net.Conn
	in  *bytes.Reader
	out bytes.Buffer
}

func (s *stub) Read(b []byte) (int, error)       { return s.in.Read(b) }
func (s *stub) Write(b []byte) (int, error)      { return s.out.Write(b) }
func (s *stub) Close() error                     { return nil }
func (s *stub) SetDeadline(time.Time) error      { return nil }
func (s *stub) SetReadDeadline(time.Time) error  { return nil }
func (s *stub) SetWriteDeadline(time.Time) error { return nil }

func from(parts ...[]byte) *stub { return &stub{in: bytes.NewReader(bytes.Join(parts, nil))} }

func TestHandshakeAndMessages(t *testing.T) {
	long := strings.Repeat("x", 300)
	longFrame := append([]byte{2, 0, 0, 0, 0, 0, 0, 1, 44}, long...)
	s := from(peerHandshake(1, "PUB"), frames("t", "12345678", "payload"), []byte{1, 0}, longFrame,
		[]byte("\x04\x05\x04NEWS"), frames(""))
	c, err := New(t.Context(), s, "tcp://peer:1", Sub, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range [][]string{{"t", "12345678", "payload"}, {"", long}, {""}} {
		m, err := c.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%q", m); got != fmt.Sprintf("%q", want) {
			t.Errorf("got %s, want %q", got, want)
		}
	}
	if _, err := c.Recv(); !errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "tcp://peer:1 closed") {
		t.Errorf("got %v at the end", err)
	}
	sent := s.out.Bytes()
	if want := peerGreeting(1, "NULL"); !bytes.Equal(sent[10:64], want[10:]) {
		t.Errorf("sent the greeting %q", sent[:64])
	}
	if want := "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"; string(sent[64:]) != want {
		t.Errorf("sent %q, want %q", sent[64:], want)
	}
}

func TestSubscribeBothWays(t *testing.T) {
	for _, tt := range []struct {
		minor byte
		want  string
	}{
		{0, "\x00\x03\x01kv"},
		{1, "\x04\x0c\x09SUBSCRIBEkv"},
	} {
		s := from(peerHandshake(tt.minor, "XPUB"))
		c, err := New(t.Context(), s, "tcp://peer:1", Sub, 64<<20)
		if err != nil {
			t.Fatal(err)
		}
		s.out.Reset()
		if err := c.Subscribe("kv"); err != nil {
			t.Fatal(err)
		}
		if got := s.out.String(); got != tt.want {
			t.Errorf("3.%d: sent %q, want %q", tt.minor, got, tt.want)
		}
	}
}

func TestSendMultipart(t *testing.T) {
	s := from(peerHandshake(1, "ROUTER"))
	c, err := New(t.Context(), s, "tcp://peer:1", Dealer, 0)
	if err != nil {
		t.Fatal(err)
	}
	s.out.Reset()
	if err := c.Send(nil, []byte("12345678"), bytes.Repeat([]byte("y"), 256)); err != nil {
		t.Fatal(err)
	}
	want := "\x01\x00" + "\x01\x0812345678" + "\x02\x00\x00\x00\x00\x00\x00\x01\x00" + strings.Repeat("y", 256)
	if got := s.out.String(); got != want {
		t.Errorf("sent %q, want %q", got, want)
	}
}

func TestBadPeers(t *testing.T) {
	ok := slices.Clip(peerHandshake(1, "PUB"))
	ready := func(body string) []byte {
		return append(append(peerGreeting(1, "NULL"), 4, byte(len(body))), body...)
	}
	for name, tt := range map[string]struct {
		in   []byte
		want string // in the error
	}{
		"nothing":           {nil, "reading the peer's greeting: EOF"},
		"HTTP":              {[]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), `does not talk ZMTP 3: its greeting begins with "HTTP/1.1 4"`},
		"ZMTP 2":            {[]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x01\x02\x00\x00"), "talks ZMTP version 1"},
		"half a greeting":   {ok[:30], "greeting: unexpected EOF"},
		"CURVE":             {peerGreeting(1, "CURVE"), `security mechanism "CURVE"`},
		"no READY":          {ok[:64], "READY: EOF"},
		"a message first":   {append(peerGreeting(1, "NULL"), frames("x")...), "a message before READY"},
		"ERROR":             {ready("\x05ERROR\x07go away"), `refused the connection: "go away"`},
		"another command":   {ready("\x04PING\x00\x00"), `the command "PING"`},
		"a REP socket":      {peerHandshake(1, "REP"), `is a "REP" socket, a SUB socket cannot`},
		"no socket type":    {ready("\x05READY"), `is a "" socket`},
		"broken name":       {ready("\x05READY\x40Socket"), "broken property name"},
		"broken value":      {ready("\x05READY\x01a\x00\x00\x00\x09b"), "broken value"},
		"command too large": {append(peerGreeting(1, "NULL"), 6, 0, 0, 0, 0, 1, 0, 0, 0), "a command of 16777216 bytes"},
		"no command name":   {append(peerGreeting(1, "NULL"), 4, 0), "without a name"},
		"reserved flags":    {append(ok, 8, 0), "invalid flags 0x08"},
		"more commands":     {append(ok, 5, 0), "invalid flags 0x05"},
		"frame too large":   {append(ok, 2, 0, 0, 0, 0, 0, 0, 4, 1), "more than 1024 bytes: one frame has 1025"},
		"frame of 2^64-1":   {append(ok, "\x02\xff\xff\xff\xff\xff\xff\xff\xff"...), "one frame has 18446744073709551615"},
		"too much together": {append(append(ok, "\x03\x00\x00\x00\x00\x00\x00\x04\x00"+strings.Repeat("x", 1024)...), frames("y")...), "more than 1024 bytes"},
		"too many frames":   {append(ok, frames(strings.Split("seventeen letters", "")...)...), "more than 16 frames"},
		"cut in a frame":    {append(ok, 0, 9, 'x'), "unexpected EOF"},
		"cut in a header":   {append(ok, 2, 0), "EOF"},
		"cut in a message":  {append(ok, 1, 1, 'x'), "closed the connection: EOF"},
		"PING without TTL":  {append(ok, "\x04\x05\x04PING"...), "without a time to live"},
		"late ERROR":        {append(ok, "\x04\x0a\x05ERROR\x03out"...), `refused the connection: "out"`},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := New(t.Context(), from(tt.in), "ipc://the-endpoint", Sub, 1024)
			for err == nil {
				_, err = c.Recv()
			}
			if !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "ipc://the-endpoint") {
				t.Errorf("got the error %q, want %q in it and the endpoint", err, tt.want)
			}
		})
	}
}

// TestMemoryFollowsArrivals announces the largest frame and sends little of it.
func TestMemoryFollowsArrivals(t *testing.T) {
	c, err := New(t.Context(), from(peerHandshake(1, "PUB"), []byte("\x02\x00\x00\x00\x00\x03\xff\xff\xff"), make([]byte, 100)), "tcp://peer:1", Sub, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := c.Recv(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("got %v", err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("100 bytes of a frame of 64 MiB made the client allocate %d bytes", n)
	}
}

// pair returns a client and its peer behind the handshake, over a pipe.
func pair(t *testing.T, minor byte, socket string) (*Conn, net.Conn) {
	t.Helper()
	near, far := net.Pipe()
	go func() {
		_, _ = far.Write(peerHandshake(minor, socket))
	}()
	go func() {
		_, _ = io.ReadFull(far, make([]byte, 64))
		var h [2]byte
		_, _ = io.ReadFull(far, h[:])
		_, _ = io.ReadFull(far, make([]byte, h[1]))
	}()
	c, err := New(t.Context(), near, "tcp://peer:1", Sub, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	return c, far
}

func expect(t *testing.T, far net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(far, got); err != nil || string(got) != want {
		t.Fatalf("the peer got %q and %v, want %q", got, err, want)
	}
}

func TestHeartbeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, far := pair(t, 1, "PUB")
		defer far.Close()
		ended := make(chan error)
		go func() {
			_, err := c.Recv()
			if err == nil {
				_, err = c.Recv()
			}
			ended <- err
		}()
		// The peer's PING, between two frames as libzmq may send it, gets its context back.
		_, _ = far.Write([]byte("\x01\x01t\x04\x0a\x04PING\x00\x0aabc"))
		expect(t, far, "\x04\x08\x04PONGabc")
		_, _ = far.Write([]byte("\x00\x01p"))
		// Silence: a PING after 5 s, and its answer keeps the connection for another 5 s.
		start := time.Now()
		expect(t, far, "\x04\x07\x04PING\x00\x00")
		if d := time.Since(start); d != 5*time.Second {
			t.Errorf("the first PING came after %v", d)
		}
		_, _ = far.Write([]byte("\x04\x05\x04PONG"))
		expect(t, far, "\x04\x07\x04PING\x00\x00")
		err := <-ended
		if d := time.Since(start); d != 25*time.Second || !errors.Is(err, ErrSilent) || !strings.Contains(err.Error(), "tcp://peer:1") {
			t.Errorf("after %v the connection ended with %v", d, err)
		}
		_ = c.Close()
	})
}

func TestOldPeerGetsNoPing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, far := pair(t, 0, "PUB")
		got := make(chan error)
		go func() {
			_, err := c.Recv()
			got <- err
		}()
		time.Sleep(time.Hour)
		_ = far.SetWriteDeadline(time.Now().Add(time.Second))
		if _, err := far.Write(frames("late")); err != nil {
			t.Fatal(err)
		}
		if err := <-got; err != nil {
			t.Error(err)
		}
		_, _ = c.Close(), far.Close()
	})
}

// TestHandshakeEnds has a peer that says nothing.
func TestHandshakeEnds(t *testing.T) {
	for want, cancelAfter := range map[time.Duration]time.Duration{5 * time.Second: time.Hour, time.Second: time.Second} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			go func() { _, _ = io.Copy(io.Discard, far) }()
			ctx, cancel := context.WithTimeout(t.Context(), cancelAfter)
			defer cancel()
			start := time.Now()
			_, err := New(ctx, near, "tcp://peer:1", Sub, 64<<20)
			if d := time.Since(start); err == nil || d != want || errors.Is(err, context.DeadlineExceeded) != (d == cancelAfter) {
				t.Errorf("got %v after %v", err, d)
			}
			_ = far.Close()
		})
	}
}

// TestPeerThatDoesNotRead must not block the client for ever.
func TestPeerThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, far := pair(t, 1, "PUB")
		start := time.Now()
		if err := c.Subscribe("x"); err == nil || time.Since(start) != writeTimeout {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
		_, _ = c.Close(), far.Close()
	})
}

func TestEndpoints(t *testing.T) {
	for _, tt := range []struct {
		endpoint string
		want     string // "" for a good one
	}{
		{"tcp://10.0.0.1:5557", ""},
		{"tcp://[::1]:5557", ""},
		{"ipc:///run/engine.sock", ""},
		{"tcp://*:5557", "the host is missing"},
		{"tcp://:5557", "the host is missing"},
		{"tcp://host:0", "not a port"},
		{"tcp://host:70000", "not a port"},
		{"tcp://host", "missing port"},
		{"ipc://", "the path is missing"},
		{"inproc://x", "only tcp and ipc are"},
		{"10.0.0.1:5557", "must begin with tcp://"},
	} {
		err := CheckEndpoint(tt.endpoint)
		if tt.want == "" && err == nil {
			continue
		}
		if err == nil || tt.want == "" || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.endpoint) {
			t.Errorf("%s: got %v, want %q", tt.endpoint, err, tt.want)
		}
	}
}

func TestDial(t *testing.T) {
	for network, address := range map[string]string{"tcp": "127.0.0.1:0", "unix": filepath.Join(t.TempDir(), "s")} {
		l, err := net.Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		endpoint := "ipc://" + address
		if network == "tcp" {
			endpoint = "tcp://" + l.Addr().String()
		}
		nc, err := Dial(t.Context(), endpoint)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = nc.Close(), l.Close()
		if _, err := Dial(t.Context(), endpoint); err == nil || !strings.Contains(err.Error(), endpoint) {
			t.Errorf("dialling a closed endpoint: got %v", err)
		}
	}
}

func FuzzConn(f *testing.F) {
	ok := peerHandshake(1, "PUB")
	f.Add([]byte{}, false)
	f.Add(ok, false)
	f.Add(append(ok, frames("t", "\x00\x00\x00\x00\x00\x00\x00\x01", "payload")...), false)
	f.Add(frames("t", "12345678", "p"), true)
	f.Add([]byte("\x02\x00\x00\x00\x00\x00\x00\x00\x01x"), true)
	f.Add([]byte("\x04\x0a\x04PING\x00\x0aabc\x00\x00"), true)
	f.Add(binary.BigEndian.AppendUint64([]byte{2}, 1<<63), true)
	f.Fuzz(func(t *testing.T, in []byte, shaken bool) {
		if shaken {
			in = append(bytes.Clone(ok), in...)
		}
		s := from(in)
		const maxBytes = 4096
		c, err := New(t.Context(), s, "tcp://peer:1", Sub, maxBytes)
		if err != nil {
			return
		}
		total := 0
		for {
			m, err := c.Recv()
			if err != nil {
				break
			}
			if len(m) == 0 || len(m) > maxFrames || m.Size() > maxBytes {
				t.Fatalf("a message of %d frames and %d bytes", len(m), m.Size())
			}
			total += m.Size()
		}
		if total > len(in) || s.out.Len() > 200+2*len(in) {
			t.Fatalf("%d bytes in made %d bytes of messages and %d bytes out", len(in), total, s.out.Len())
		}
	})
}
