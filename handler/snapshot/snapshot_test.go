package snapshot

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/snapshot/snapshottest"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// stored is a record as a test keeps it.
type stored = Record

// keep copies what belongs to the reader.
func keep(r *Record) stored {
	one := *r
	if one.Kind == KindChain {
		one.Chain.Blocks, one.Chain.Parts = slices.Clone(one.Chain.Blocks), slices.Clone(one.Chain.Parts)
	}
	return one
}

// readAll reads a whole snapshot.
func readAll(t testing.TB, p *Place) (*Head, []stored) {
	t.Helper()
	h, err := ReadHead(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	var all []stored
	for n := 1; n <= h.Parts(); n++ {
		part, err := h.ReadPart(t.Context(), p, n)
		if err != nil {
			t.Fatal(err)
		}
		for {
			var r Record
			if !part.Next(&r) {
				break
			}
			all = append(all, keep(&r))
		}
		if part.Err() != nil {
			t.Fatalf("part %d: %v", n, part.Err())
		}
	}
	return h, all
}

// write writes a record.
func write(w *Writer, r *Record) {
	switch r.Kind {
	case KindWorker:
		w.Worker(&r.Worker)
	case KindBinding:
		w.Binding(&r.Binding, r.Target)
	case KindChain:
		w.Chain(&r.Chain, r.Target)
	case KindResponse:
		w.Response(&r.Response, r.Target)
	case KindLearned:
		w.Learned(&r.Learned)
	case KindTarget:
		w.LearnedTarget(&r.Of, r.Target)
	case KindRatios:
		w.Ratios(&r.Ratios)
	}
}

func key(rnd *rand.Rand) (k affinity.Key) {
	for i := range k {
		k[i] = byte(rnd.Uint32())
	}
	return k
}

// records returns some of each kind. Chains share beginnings.
func records(rnd *rand.Rand, n int) (list []stored) {
	list = append(list,
		stored{Kind: KindWorker, Worker: Worker{Dial: "10.0.0.1:8000", Life: "1700000000.25", Seen: time.UnixMilli(1.7e12), Confirmed: 3}},
		stored{Kind: KindWorker, Worker: Worker{Dial: "unix//run/engine.sock", Seen: time.UnixMilli(-5)}},
	)
	learned := kvscore.Learned{Samples: 7, Continued: 0.5, Capacity: -0.25, Answers: 1 << 40}
	learned.Latency[1], learned.Squares[15] = 30.5, 1e9
	list = append(list,
		stored{Kind: KindLearned, Learned: learned},
		stored{Kind: KindTarget, Target: Target{1, 3}, Of: kvscore.LearnedTarget{Declared: 262144, Capacity: -0.5, Slowness: 0.1, Age: time.Minute, Samples: 4}},
		stored{Kind: KindRatios, Ratios: kvscore.ModelRatios{Name: 99, Tokens: [cache.Kinds]float64{0.25, 0.5}}},
	)
	stem := make([]uint64, 50)
	for i := range stem {
		stem[i] = rnd.Uint64()
	}
	for i := range n {
		list = append(list,
			stored{Kind: KindBinding, Target: Target{i % 2, uint32(i % 3)}, Binding: affinity.Saved{
				Key: key(rnd), Idle: time.Duration(i) * time.Millisecond,
				Want: affinity.Want{TTL: 5 * time.Minute, Scope: rnd.Uint32(), Kind: affinity.Kind(i % 2), EngineSession: strings.Repeat("s", i%4)},
			}},
			stored{Kind: KindResponse, Target: Target{0, 1}, Response: Response{Hash: rnd.Uint64(), Session: affinity.Identity(key(rnd))}},
			stored{Kind: KindChain, Target: Target{i % 2, 0}, Chain: chain(rnd, stem)},
		)
	}
	return list
}

// chain returns one that begins with a part of the stem.
func chain(rnd *rand.Rand, stem []uint64) cache.Chain {
	c := cache.Chain{Root: 5}
	for _, n := range []int{10, 30, 10} {
		c.Blocks = append(c.Blocks, stem[len(c.Blocks):len(c.Blocks)+n]...)
		c.Parts = append(c.Parts, cache.Part{Blocks: n, Weight: 16000, Arrivals: uint16(n)})
		if rnd.IntN(3) == 0 {
			break
		}
	}
	for range rnd.IntN(3) {
		n := 1 + rnd.IntN(9)
		for range n {
			c.Blocks = append(c.Blocks, rnd.Uint64())
		}
		c.Parts = append(c.Parts, cache.Part{Blocks: n, Weight: 15000, Count: int32(rnd.IntN(2) * 1000), Past: 100, Weighed: rnd.IntN(2) > 0})
		if c.Parts[len(c.Parts)-1].Count == 0 {
			c.Parts[len(c.Parts)-1].Past = 0
		}
	}
	return c
}

func save(t testing.TB, p *Place, last *Head, list []stored) *Head {
	t.Helper()
	w := NewWriter(t.Context(), p, last)
	for i := range list {
		write(w, &list[i])
	}
	h, err := w.Finish(Head{Saved: time.UnixMilli(1.7e12), Secret: affinity.Secret{1, 2}, Seed: 3, Version: 4, TextBlock: 64})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestSnapshotReadsAsWritten(t *testing.T) {
	store := new(snapshottest.Memory)
	p := At(store, "router", "default")
	list := records(rand.New(rand.NewPCG(1, 1)), 5000)
	h := save(t, p, nil, list)
	got, all := readAll(t, p)
	if !reflect.DeepEqual(got, h) {
		t.Errorf("head %+v, want %+v", got, h)
	}
	if len(all) != len(list) {
		t.Fatalf("%d records, want %d", len(all), len(list))
	}
	for i := range list {
		if !reflect.DeepEqual(all[i], list[i]) {
			t.Fatalf("record %d: %+v, want %+v", i, all[i], list[i])
		}
	}
	if h.Parts() < 2 {
		t.Error("everything is in one part")
	}
	for key, v := range store.Values {
		if len(v) > MaxValue || !strings.HasPrefix(key, "kv_router/router/default/") {
			t.Errorf("%s has %d bytes", key, len(v))
		}
	}
}

// TestSnapshotsReplaceEachOther writes snapshots of several sizes. Storage holds two at most,
// and one that breaks off leaves the one before.
func TestSnapshotsReplaceEachOther(t *testing.T) {
	store := new(snapshottest.Memory)
	p := At(store, "r", "p")
	rnd := rand.New(rand.NewPCG(2, 2))
	var last *Head
	for _, n := range []int{9000, 10, 8000, 10, 10, 4000, 1, 1} {
		list := records(rnd, n)
		if last != nil { // as after a restart
			last, _ = readAll(t, p)
		}
		parts := 0
		if last != nil {
			parts = last.parts
		}
		last = save(t, p, last, list)
		if _, all := readAll(t, p); len(all) != len(list) {
			t.Fatalf("%d records of %d", len(all), len(list))
		}
		if have := len(store.Values); have > 1+last.parts+parts {
			t.Errorf("%d values for snapshots of %d and %d parts", have, last.parts, parts)
		}
	}
	before := len(records(rnd, 1))
	store.Fails = errors.New("disk full")
	w := NewWriter(t.Context(), p, last)
	for _, r := range records(rnd, 9000) {
		write(w, &r)
	}
	if len(w.buf) > MaxValue || w.Err() == nil {
		t.Errorf("%d bytes kept after %v", len(w.buf), w.Err())
	}
	if _, err := w.Finish(Head{}); !errors.Is(err, store.Fails) {
		t.Error(err)
	}
	if _, all := readAll(t, p); len(all) != before {
		t.Errorf("%d records are left of the snapshot before, want %d", len(all), before)
	}
	store.Fails = nil
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := NewWriter(ctx, p, last).Finish(Head{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestDamageIsNoticed damages values in many ways.
func TestDamageIsNoticed(t *testing.T) {
	store := new(snapshottest.Memory)
	p := At(store, "r", "p")
	if _, err := ReadHead(t.Context(), p); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	h := save(t, p, nil, records(rand.New(rand.NewPCG(3, 3)), 20))
	head, part := store.Values[p.prefix+"head"], store.Values[p.partKey(0, 1)]
	other := begin(nil, h.id, 0)
	other[len(magic)]++
	for _, c := range []struct {
		name string
		head []byte
		want error
	}{
		{"empty", nil, ErrCorrupt},
		{"other", bytes.Repeat([]byte("x"), 300), ErrCorrupt},
		{"truncated", head[:len(head)-1], ErrCorrupt},
		{"longer", append(slices.Clone(head), 0), ErrCorrupt},
		{"a part", part, ErrCorrupt},
		{"other version", seal(other), ErrVersion},
		{"nothing but a frame", seal(begin(nil, h.id, 0)), ErrCorrupt},
		{"huge", make([]byte, MaxValue+1), ErrCorrupt},
		{"too many parts", (&Head{id: 1, parts: maxParts + 1}).value(), ErrTooLarge},
	} {
		if _, err := parseHead(c.head); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	for i := range part {
		bad := slices.Clone(part)
		bad[i] ^= 0x10
		if _, err := parsePart(bad, h.id, 1); err == nil {
			t.Fatalf("byte %d of %d may change", i, len(part))
		}
	}
	if _, err := parsePart(part, h.id+1, 1); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a part of another snapshot: %v", err)
	}
	if _, err := parsePart(part, h.id, 2); !errors.Is(err, ErrCorrupt) {
		t.Errorf("another part: %v", err)
	}
	delete(store.Values, p.partKey(0, 1))
	if _, err := h.ReadPart(t.Context(), p, 1); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a part that is gone: %v", err)
	}
}

func TestKeysAreSafe(t *testing.T) {
	for _, name := range []string{"a/b", "..", "", "ä b", `c:\d`} {
		p := At(new(snapshottest.Memory), name, name)
		if parts := strings.Split(p.Name(), "/"); len(parts) != 4 || strings.Contains(p.Name(), ".") || strings.ContainsAny(p.Name(), `\:`) {
			t.Errorf("%q lies at %s", name, p.Name())
		}
	}
}

// FuzzParts reads arbitrary contents with a right checksum.
func FuzzParts(f *testing.F) {
	store := new(snapshottest.Memory)
	p := At(store, "r", "p")
	w := NewWriter(context.Background(), p, nil)
	for _, r := range records(rand.New(rand.NewPCG(4, 4)), 3) {
		write(w, &r)
		f.Add(slices.Clone(w.record))
	}
	f.Add(slices.Clone(w.buf[len(begin(nil, 0, 1)):]))
	f.Fuzz(func(t *testing.T, content []byte) {
		if len(content) > 64<<10 {
			return
		}
		part, err := parsePart(seal(append(begin(nil, 1, 1), content...)), 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		again := NewWriter(context.Background(), p, nil)
		var r Record
		for part.Next(&r) {
			if r.Kind == KindChain && !r.Chain.Valid() {
				t.Fatalf("invalid chain %+v", r.Chain)
			}
			write(again, &r)
		}
		_, _ = parseHead(content)
		_, _ = parseHead(seal(append(begin(nil, 1, 0), content...)))
	})
}

// TestSizeOfAMillionBindings prints what a snapshot of many sessions takes.
func TestSizeOfAMillionBindings(t *testing.T) {
	n := 1_000_000
	if testing.Short() {
		n = 20_000
	}
	store := new(snapshottest.Memory)
	w := NewWriter(t.Context(), At(store, "r", "p"), nil)
	rnd := rand.New(rand.NewPCG(6, 6))
	s := affinity.Saved{Want: affinity.Want{TTL: 5 * time.Minute}}
	for range n {
		s.Key, s.Idle, s.Scope = key(rnd), time.Duration(rnd.IntN(300_000))*time.Millisecond, 0
		w.Binding(&s, Target{rnd.IntN(100), 0})
	}
	h, err := w.Finish(Head{})
	if err != nil {
		t.Fatal(err)
	}
	each := float64(w.Bytes()) / float64(n)
	t.Logf("%d bindings: %d values, %d bytes, %.1f each", n, h.Parts(), w.Bytes(), each)
	if each > 32 {
		t.Errorf("a binding takes %.1f bytes", each)
	}
}
