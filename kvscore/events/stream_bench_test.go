package events

import (
	"context"
	"encoding/binary"
	"net"
	"testing"
	"time"

	"go.uber.org/zap"
)

// counter is a sink that only counts.
type counter struct {
	want uint64
	done chan struct{}
}

func (c *counter) Payload(seq uint64, _ []byte) bool {
	if seq+1 == c.want {
		close(c.done)
	}
	return false
}
func (c *counter) Reset(string)      {}
func (c *counter) State(State, bool) {}

// BenchmarkLive sends batches of 250 bytes, one stored block of 16 tokens each, over loopback
// TCP. Each is a message of its own.
func BenchmarkLive(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	p := newPublisher()
	message := encode(nil, be(0), make([]byte, 250))
	const seqAt = 9 + 9 // behind two frame headers
	sink := &counter{want: uint64(b.N), done: make(chan struct{})}
	go func() {
		nc, err := l.Accept()
		if err != nil || !p.greet(nc, "PUB") {
			return
		}
		defer nc.Close()
		if _, err := readFrame(nc); err != nil { // the subscription
			return
		}
		var out []byte
		for i := range b.N {
			binary.BigEndian.PutUint64(message[seqAt:], uint64(i))
			out = append(out, message...)
			if len(out) > 64<<10 || i == b.N-1 {
				if _, err := nc.Write(out); err != nil {
					return
				}
				out = out[:0]
			}
		}
		<-sink.done // batches that wait when the connection ends are void
	}()
	s, err := New(Config{Endpoint: "tcp://" + l.Addr().String()}, sink, zap.NewNop())
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan struct{})
	b.ReportAllocs()
	b.ResetTimer()
	go func() { s.Run(ctx); close(ended) }()
	select {
	case <-sink.done:
	case <-time.After(time.Minute):
		b.Error("the batches did not arrive")
	}
	b.StopTimer()
	cancel()
	<-ended
}
