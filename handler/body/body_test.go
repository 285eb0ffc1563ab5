package body

import (
	"bytes"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// bufferOf returns a buffer with a copy of the bytes in it.
func bufferOf(p []byte) *Buffer {
	b := NewBuffer(int64(len(p)))
	b.Data = append(b.Data, p...)
	return b
}

// TestMemoryIsKeptWhileItIsRead lets go of bodies in every order of maker and
// readers, while others take memory up: no reader may see bytes of another.
func TestMemoryIsKeptWhileItIsRead(t *testing.T) {
	var all sync.WaitGroup
	for seed := range uint64(8) {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(4, seed))
			for range 30 {
				want := bytes.Repeat([]byte{byte(rng.Uint32())}, small+1+rng.IntN(small))
				buf := bufferOf(want)
				b := NewReplay(buf, buf.Data)
				readers := []io.ReadCloser{b.open(), b.open(), b.open()}
				b.Done()
				for _, r := range readers {
					if got, err := io.ReadAll(io.LimitReader(r, int64(rng.IntN(3*small)))); err != nil || !bytes.HasPrefix(want, got) {
						t.Errorf("%d bytes that are not the body's, or error %v", len(got), err)
					}
					r.Close()
					r.Close() // the second time says nothing new
				}
			}
		})
	}
	all.Wait()
}

// TestReplayIsClosedWhileItIsRead does what net/http may do, for the race
// detector to see.
func TestReplayIsClosedWhileItIsRead(t *testing.T) {
	want := noise(2 * small)
	buf := bufferOf(want)
	b := NewReplay(buf, buf.Data)
	var all sync.WaitGroup
	for range 20 {
		r := b.open()
		all.Go(func() {
			got, _ := io.ReadAll(iotest.HalfReader(r))
			if !bytes.HasPrefix(want, got) {
				t.Errorf("%d bytes that are not the body's", len(got))
			}
		})
		all.Go(func() { r.Close() })
	}
	last := b.open()
	b.Done()
	all.Wait()
	if got, err := io.ReadAll(last); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, error %v", len(got), err)
	}
	last.Close()
	if b.Data != nil {
		t.Error("the body is kept when all have let go of it")
	}
	if n, err := last.Read(make([]byte, 10)); n != 0 || err == nil {
		t.Errorf("%d bytes after it was closed, error %v", n, err)
	}
}

// TestBodyIsSentWithChanges changes short and long bodies, and sends each twice
// and as it is.
func TestBodyIsSentWithChanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 4))
	for i := range 400 {
		body := noise(rng.IntN(100))
		if i%4 == 0 {
			body = noise(small + rng.IntN(2*small))
		}
		buf := bufferOf(body)
		b := NewReplay(buf, buf.Data)
		var edits []rawjson.Edit
		var want []byte
		at := 0
		for range rng.IntN(4) {
			start := at + rng.IntN(len(body)-at+1)
			end := start + rng.IntN(len(body)-start+1)
			e := rawjson.Edit{Span: rawjson.Span{Start: start, End: end}, Text: noise(rng.IntN(10))}
			if rng.IntN(4) == 0 {
				e.Text = buf.Data[rng.IntN(len(body)+1):]
			}
			want = append(append(want, body[at:start]...), e.Text...)
			edits, at = append(edits, e), end
		}
		want = append(want, body[at:]...)
		s, plain := b.Edit(edits), b.Edit(nil)
		for _, v := range []struct {
			s    Edited
			want string
		}{{s, string(want)}, {plain, string(body)}, {s, string(want)}} {
			begun := v.s.Open() // an attempt that ends early
			some, err := io.ReadAll(io.LimitReader(begun, int64(rng.IntN(len(v.want)+1))))
			if err != nil || !strings.HasPrefix(v.want, string(some)) {
				t.Fatalf("sent %.80q, error %v, want %.80q", some, err, v.want)
			}
			begun.Close()
			r := v.s.Open()
			got, err := io.ReadAll(iotest.HalfReader(r))
			if err != nil || string(got) != v.want || v.s.Size != int64(len(got)) {
				t.Fatalf("sent %.80q, error %v, want %.80q", got, err, v.want)
			}
			r.Close()
		}
		b.Done()
		if n := b.users.Load(); n != 0 {
			t.Fatalf("%d users are left", n)
		}
	}
}
