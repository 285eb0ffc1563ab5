package body

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"testing/iotest"
)

// bufferOf returns a buffer with a copy of the bytes in it.
func bufferOf(p []byte) *Buffer {
	b := NewBuffer(int64(len(p)))
	b.Data = append(b.Data, p...)
	return b
}

// TestReplayIsTheSameEachTime opens a body again and again, and
// reads it in pieces of random size, to the end or not.
func TestReplayIsTheSameEachTime(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	for i := range 200 {
		want := noise(rng.IntN(500))
		if i%4 == 0 {
			want = noise(small + rng.IntN(3*small))
		}
		buf := bufferOf(want)
		b := NewReplay(buf, buf.Data)
		if b.Size != int64(len(want)) {
			t.Fatalf("size %d, want %d", b.Size, len(want))
		}
		for range 4 {
			r, stop := b.open(), rng.IntN(len(want)+20)
			var got []byte
			var err error
			for err == nil && len(got) < stop {
				p := make([]byte, 1+rng.IntN(len(want)/3+10))
				var n int
				n, err = r.Read(p)
				got = append(got, p[:n]...)
			}
			if err != nil && !errors.Is(err, io.EOF) || !bytes.HasPrefix(want, got) || errors.Is(err, io.EOF) && len(got) != len(want) {
				t.Fatalf("%d of %d bytes, error %v", len(got), len(want), err)
			}
			r.Close()
		}
		b.Done()
	}
	if r := NewReplay(nil, nil).open(); r != http.NoBody {
		t.Errorf("no bytes open as %T", r)
	}
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
