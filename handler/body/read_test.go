package body

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
)

// noise returns n bytes that do not repeat.
func noise(n int) []byte {
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(rng.Uint32())
	}
	return out
}

// heldReader returns its bytes in pieces of random size, some of them empty. It checks at each
// read that the memory is in proportion to the bytes so far.
type heldReader struct {
	t     *testing.T
	left  []byte
	rng   *rand.Rand
	most  int // bytes of a piece
	held  *atomic.Int64
	given int64
}

// Read implements io.Reader.
func (r *heldReader) Read(p []byte) (int, error) {
	if n := r.held.Load(); n > max(firstRead, 4*r.given) {
		r.t.Errorf("%d bytes are held when %d have arrived", n, r.given)
	}
	if len(r.left) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.left[:min(len(r.left), r.rng.IntN(r.most))])
	r.left = r.left[n:]
	r.given += int64(n)
	return n, nil
}

// FuzzReadBody reads bodies of any size, announced or not, in pieces of random
// size: it returns the bytes that were sent, and memory follows them.
func FuzzReadBody(f *testing.F) {
	for _, size := range []uint32{0, 1, small, firstRead - 1, firstRead, firstRead * 4, longRead - 1, longRead, longRead + 1, 3 << 20, 5 << 20, 8<<20 - 1, 8 << 20, 8<<20 + 1} {
		f.Add(size, uint64(70_000), true)
		f.Add(size, uint64(5_000), false)
	}
	f.Fuzz(func(t *testing.T, size uint32, seed uint64, announced bool) {
		const limit = 8 << 20
		want := noise(int(size % (9 << 20)))
		length := int64(-1)
		if announced {
			length = int64(len(want))
		}
		var m Memory
		held := &m.Held
		in := &heldReader{t: t, left: want, rng: rand.New(rand.NewPCG(seed, 1)), most: 2 + int(seed%100_000), held: held}
		all, rest, err := m.Read(io.NopCloser(in), length, limit)
		if err != nil || (all == nil) != (len(want) > limit) {
			t.Fatalf("a body: %v, a rest: %v, error %v", all != nil, rest != nil, err)
		}
		var got []byte
		if all != nil {
			if n := held.Load(); n != int64(cap(all.Data)) {
				t.Errorf("%d bytes are counted, of %d", n, cap(all.Data))
			}
			got = bytes.Clone(all.Data)
			all.free() // so that later ones have memory that was used
		} else if got, err = io.ReadAll(rest); err != nil {
			t.Error(err)
		}
		if rest.Done(); !bytes.Equal(got, want) || held.Load() != 0 {
			t.Errorf("%d bytes of %d came out, or others; %d stay counted", len(got), len(want), held.Load())
		}
	})
}

// TestReadBodyFails breaks bodies off at each stage.
func TestReadBodyFails(t *testing.T) {
	broken := errors.New("broken")
	for _, n := range []int{0, 1, 16 << 10, firstRead + 1} {
		var m Memory
		held := &m.Held
		all, rest, err := m.Read(io.NopCloser(io.MultiReader(bytes.NewReader(noise(n)), iotest.ErrReader(broken))), -1, 1<<20)
		if all != nil || rest != nil || !errors.Is(err, broken) || held.Load() != 0 {
			t.Errorf("after %d bytes: a body: %v, a rest: %v, error %v, %d bytes counted", n, all != nil, rest != nil, err, held.Load())
		}
	}
	// What breaks behind the limit is the engine's to be told.
	_, rest, err := new(Memory).Read(io.NopCloser(io.MultiReader(bytes.NewReader(noise(2000)), iotest.ErrReader(broken))), -1, 1000)
	if err != nil || rest == nil {
		t.Fatalf("a rest: %v, error %v", rest != nil, err)
	}
	if got, err := io.ReadAll(rest); len(got) != 2000 || !errors.Is(err, broken) {
		t.Errorf("%d bytes are given back, error %v", len(got), err)
	}
}

// TestNoRoomForBody has as much in memory as there may be: what is short is read
// all the same, the rest streamed.
func TestNoRoomForBody(t *testing.T) {
	var m Memory
	held := &m.Held
	held.Store(MaxBytes())
	if buf, _, err := m.Read(io.NopCloser(bytes.NewReader(noise(1000))), 1000, 1<<20); err != nil || buf == nil {
		t.Errorf("a short one: read: %v, error %v", buf != nil, err)
	}
	held.Store(MaxBytes() + MaxBytes()/2)
	if _, rest, err := m.Read(io.NopCloser(bytes.NewReader(noise(firstRead))), firstRead, 1<<20); err != nil || rest == nil {
		t.Errorf("a short one, with half as much again in memory: a rest: %v, error %v", rest != nil, err)
	} else {
		rest.Done()
	}
	held.Store(MaxBytes())
	body := noise(shortBody * 3)
	buf, rest, err := m.Read(io.NopCloser(bytes.NewReader(body)), int64(len(body)), 64<<20)
	if err != nil || buf != nil || !rest.NoRoom {
		t.Fatalf("a long one: read: %v, error %v", buf != nil, err)
	}
	if all, err := io.ReadAll(rest); err != nil || !bytes.Equal(all, body) {
		t.Errorf("%d of %d bytes are streamed, error %v", len(all), len(body), err)
	}
	if rest.Done(); held.Load() != MaxBytes() {
		t.Errorf("%d bytes stay counted", held.Load()-MaxBytes())
	}
}

// TestLazyBodyIsLetGo reads the body that the proxy has, before it is let go and
// after.
func TestLazyBodyIsLetGo(t *testing.T) {
	want := noise(100)
	l := &Lazy{Of: NewReplay(nil, want)}
	if got, err := io.ReadAll(l); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, error %v", len(got), err)
	}
	if n, err := (&Lazy{}).Read(make([]byte, 1)); n != 0 || !errors.Is(err, http.ErrBodyReadAfterClose) {
		t.Errorf("%d bytes of nothing, error %v", n, err)
	}
}

// TestOnceKnowsWhatBecameOfIt has bodies that cannot be sent again.
func TestOnceKnowsWhatBecameOfIt(t *testing.T) {
	broken := errors.New("broken")
	for _, v := range []struct {
		name            string
		body            io.Reader
		read            bool
		touched, failed bool
	}{
		{"NotRead", bytes.NewReader(noise(10)), false, false, false},
		{"Read", bytes.NewReader(noise(10)), true, true, false},
		{"Empty", bytes.NewReader(nil), true, true, false},
		{"Broken", iotest.ErrReader(broken), true, true, true},
		{"BrokenLater", io.MultiReader(bytes.NewReader(noise(10)), iotest.ErrReader(broken)), true, true, true},
	} {
		o := &Once{ReadCloser: io.NopCloser(v.body)}
		if v.read {
			io.Copy(io.Discard, o)
		}
		if o.Touched.Load() != v.touched || o.Failed.Load() != v.failed {
			t.Errorf("%s: touched %v, failed %v", v.name, o.Touched.Load(), o.Failed.Load())
		}
	}
}

// TestHalfSentBodyIsNotGivenBack hands back a body that an attempt has read a part of. The rest
// alone would be another request.
func TestHalfSentBodyIsNotGivenBack(t *testing.T) {
	r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("the rest"))
	once := restOf(NewBuffer(8), r.Body, false)
	once.Touched.Store(true)
	once.Done()
	GiveBack(r, nil, once)
	if n, err := r.Body.Read(make([]byte, 8)); n != 0 || !errors.Is(err, http.ErrBodyReadAfterClose) {
		t.Errorf("%d bytes, error %v", n, err)
	}
}
