package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"
)

// talk is a conversation, as a router sees it.
type talk struct {
	root   uint64
	blocks []uint64
	ids    []uint64
}

// world books requests of conversations that share beginnings, and knows what a reader must see.
type world struct {
	*rand.Rand
	Journal
	outlet *Outlet
	stem   []uint64
	talks  []*talk
	want   map[uint64][]uint64 // the blocks of prompt and answer, by request
	fresh  int                 // blocks that a reader cannot know
}

func newWorld(seed uint64) *world {
	w := &world{Rand: rand.New(rand.NewPCG(seed, 1)), want: make(map[uint64][]uint64)}
	w.outlet = w.Open(true)
	w.stem = w.some(300)
	for i := range 20 {
		w.talks = append(w.talks, &talk{root: uint64(i % 3), blocks: slices.Clone(w.stem[:w.IntN(300)])})
		w.fresh += len(w.talks[i].blocks)
	}
	return w
}

func (w *world) some(n int) []uint64 {
	b := make([]uint64, n)
	for i := range b {
		b[i] = w.Uint64()
	}
	return b
}

// turn books a turn of a conversation and ends it.
func (w *world) turn(now time.Time) {
	k := w.talks[w.IntN(len(w.talks))]
	matched := len(k.blocks)
	if w.IntN(10) == 0 {
		k.blocks = k.blocks[:w.IntN(len(k.blocks)+1)] // an edited history
		w.fresh += markEvery
	}
	known := len(k.blocks)
	k.blocks = append(slices.Clip(k.blocks), w.some(w.IntN(30))...)
	p := &cache.Prompt{Root: k.root, Blocks: k.blocks, Past: 0.5, BlockTokens: 16, Tokens: int64(16*len(k.blocks) + 8)}
	v := &cache.View{Findings: cache.Findings{Tokens: p.Tokens, Known: cache.Known{Blocks: matched}}}
	id := w.Booked(now, kvscore.Target{Worker: uint64(w.IntN(3)), Rank: 1}, p, v, true, 100, kvscore.PhaseWhole)
	answer := w.some(w.IntN(5))
	w.Ended(id, true, 101, kvscore.Counts{Prompt: p.Tokens, Answer: p.Tokens + 100, AnswerPast: 0.25}, answer)
	w.want[id] = append(slices.Clip(k.blocks), answer...)
	w.fresh += len(w.want[id]) - known
	k.blocks = w.want[id]
}

func named(id uint64) string { return fmt.Sprint("10.0.0.", id) }

// learned is a state with something in each part.
func learned() *State {
	s := &State{
		Workers: []Worker{{Dial: "10.0.0.1:8000", ID: 5, BootID: "1700000000.25", Seen: time.UnixMilli(1.7e12)}},
		Learned: kvscore.Learned{Samples: 7, Prefill: 3, Capacity: -0.25, Answers: 1 << 40},
		Ratios:  []texts.ModelRatios{{Name: 1<<64 - 1, Tokens: [cache.Kinds]float64{0.25, 0.5}}},
	}
	s.Learned.Latency[1], s.Learned.Squares[15] = 30.5, 1e9
	s.Learned.Targets = []kvscore.LearnedTarget{{
		Target: kvscore.Target{Worker: 6, Rank: 1}, Declared: 262144, Capacity: -0.5, Slowness: 0.1, Age: time.Minute, Samples: 4,
	}}
	return s
}

// TestPromptsReadAsWritten reads the prompts of conversations back, from entries of which some
// are lost. What is there is right, and what builds on lost prompts is not there.
func TestPromptsReadAsWritten(t *testing.T) {
	for _, lossy := range []bool{false, true} {
		w := newWorld(7)
		var e Encoder
		var log bytes.Buffer
		var raw, blocks, entries, gone int
		e.StartEpoch(time.UnixMilli(0), &Head{Seed: 9})
		for range 400 {
			for range 1 + w.IntN(5) {
				w.turn(time.UnixMilli(1e12))
			}
			w.outlet.Write(&e, named)
			entry := e.Entry()
			if entries++; lossy && entries > 1 && w.IntN(10) == 0 {
				gone++
				continue
			}
			raw += len(entry)
			log.Write(entry)
		}
		seen, right := 0, 0
		_, damage, err := Read(&log, func(r *Record) bool {
			end, over := r.Body.(*End)
			if !over {
				return true
			}
			seen++
			if r.Booking.Prompt == nil || !end.Computed {
				return true
			}
			p := end.Answer
			if p == nil {
				p = r.Booking.Prompt
			} else if end.AnswerTokens != end.Tokens+100 || p.Past != 0.25 {
				t.Fatalf("answer %+v", end)
			}
			got := p.Append(nil)
			for _, want := range w.want {
				if slices.Equal(got, want) {
					right++
					return true
				}
			}
			t.Fatalf("a prompt of %d blocks that nobody has sent", len(got))
			return true
		})
		for _, b := range w.want {
			blocks += len(b)
		}
		if err != nil || damage != (Damage{}) {
			t.Errorf("%+v, %v", damage, err)
		}
		if !lossy && (seen != len(w.want) || right != seen) {
			t.Errorf("%d of %d requests are right, %d were read", right, len(w.want), seen)
		}
		if lossy && (gone == 0 || right < len(w.want)/20) {
			t.Errorf("%d of %d requests are right without %d entries", right, len(w.want), gone)
		}
		if most := 8*w.fresh + 64*len(w.want); !lossy && raw > most {
			t.Errorf("%d bytes for %d requests, want at most %d; all blocks would be %d", raw, len(w.want), most, 8*blocks)
		}
	}
}

// records are one of each kind but those of requests, as they are read.
func records() []Record {
	at := func(ms int64) time.Time { return time.UnixMilli(ms) }
	five, six := kvscore.Target{Worker: 5}, kvscore.Target{Worker: 1 << 63}
	return []Record{
		{Kind: KindEpoch, At: at(1000), Body: &Head{Secret: affinity.Secret{1, 2}, Seed: 3, Version: 4, TextBlock: 64}},
		{Kind: KindWorker, At: at(1001), Target: five, Body: new(Address("10.0.0.1:8000"))},
		{Kind: KindWorker, At: at(1001), Target: six, Body: new(Address("unix//run/engine.sock"))},
		{Kind: KindBound, At: at(999), Target: kvscore.Target{Worker: 1 << 63, Rank: 3}, Body: &affinity.Saved{
			Key: affinity.Key{9}, Idle: time.Second, Want: affinity.Want{
				TTL: 5 * time.Minute, Scope: 77, Kind: affinity.EngineBacked, EngineSession: "s\xff",
			}, Version: 6,
		}},
		{Kind: KindUsed, At: at(1002), Body: &affinity.Saved{Key: affinity.Key{9}}},
		{Kind: KindUnbound, At: at(1003), Body: &affinity.Saved{Key: affinity.Key{9}, Version: 7}},
		{Kind: KindResponse, At: at(1004), Target: five, Body: &Response{Hash: 12, Session: affinity.Identity{4}}},
		{Kind: KindLost, At: at(1005), Target: six, Body: new(Lost)},
		{Kind: KindState, At: at(1006), Body: learned()},
		{Kind: KindDrained, At: at(1007), Target: six, Body: &Drain{true, 3}},
		{Kind: KindModels, At: at(1008), Target: six, Body: &[]Model{{ID: "m"}, {ID: "a", Adapter: true}}},
		{Kind: KindQuota, At: at(1009), Body: &quota.Change{
			Key: quota.Key{Tenant: 1, Class: 2}, Requests: 1, Tokens: -500, Running: -1, Age: time.Second,
		}},
		{Kind: KindTenant, At: at(1010), Body: &quota.State{Key: quota.Key{Tenant: 1}, Levels: []quota.Level{
			{Unit: quota.Tokens, Per: quota.Day, Used: 7, Period: 20784},
		}}},
	}
}

// write writes records.
func write(e *Encoder, all []Record) {
	for i := range all {
		switch r := &all[i]; b := r.Body.(type) {
		case *Head:
			e.StartEpoch(r.At, b)
		case *Address:
			e.Worker(r.At, r.Target.Worker, string(*b))
		default:
			e.Write(r, nil)
		}
	}
}

func readAll(t testing.TB, b []byte) (all []Record, d Damage) {
	t.Helper()
	_, d, err := Read(bytes.NewReader(b), func(r *Record) bool {
		all = append(all, *r)
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return all, d
}

func TestRecordsReadAsWritten(t *testing.T) {
	want, e := records(), new(Encoder)
	write(e, want)
	long := Record{Kind: KindModels, At: time.UnixMilli(1011), Target: want[1].Target, Body: new([]Model)}
	want = append(want, long)
	long.Body = new(make([]Model, maxModels/modelBytes+1))
	e.Write(&long, nil)
	for _, bad := range []Record{
		{Kind: KindBound, Target: want[1].Target, Body: &affinity.Saved{Want: affinity.Want{EngineSession: strings.Repeat("s", maxText+1)}}},
		{Kind: KindState, Body: &State{Learned: kvscore.Learned{Capacity: math.Inf(1)}}},
		{Kind: KindLost, Target: kvscore.Target{Worker: 7}, Body: new(Lost)}, // has no address
	} {
		e.Write(&bad, nil)
	}
	all, damage := readAll(t, e.Entry())
	if len(all) != len(want) || damage != (Damage{}) {
		t.Fatalf("%d records, %+v", len(all), damage)
	}
	for i := range want {
		if !reflect.DeepEqual(all[i], want[i]) {
			t.Errorf("record %d: %+v\nwant %+v", i, all[i], want[i])
		}
	}
}

// TestNewerRecordsAreSkipped reads kinds and fields that this version does not know, and an entry of another one.
func TestNewerRecordsAreSkipped(t *testing.T) {
	var e Encoder
	write(&e, records())
	writeRaw(t, &e, 200, map[int]any{1: 200, 2: 5, 99: "of the future"})
	writeRaw(t, &e, KindUsed, map[int]any{1: affinity.Key{8}, 50: []int{1}, 77: 1.5})
	booked := Record{Kind: KindBooked, At: time.UnixMilli(1012), Target: kvscore.Target{Worker: 5}, Request: 3, Body: new(Booking)}
	e.Write(&Record{Kind: 201, At: booked.At, Request: 9, Body: new(Lost)}, nil)
	e.Write(&booked, nil)
	all, damage := readAll(t, e.Entry())
	if n := len(records()); len(all) != n+2 || damage != (Damage{}) || all[n].Body.(*affinity.Saved).Key != (affinity.Key{8}) || all[n+1].Request != 3 {
		t.Errorf("%d records, %+v", len(all), damage)
	}
	write(&e, records())
	entry := slices.Clone(e.Entry())
	entry[4]++
	if all, damage = readAll(t, entry); len(all) != 0 || damage.Entries != 1 {
		t.Errorf("%d records of another version, %+v", len(all), damage)
	}
}

// writeRaw writes a record of any kind.
func writeRaw(t testing.TB, e *Encoder, k Kind, body any) {
	t.Helper()
	e.entry.WriteByte(byte(k))
	if err := errors.Join(encoding.MarshalToBuffer(common{Worker: 5}, &e.entry), encoding.MarshalToBuffer(body, &e.entry)); err != nil {
		t.Fatal(err)
	}
}

// TestDamagedRecordsEndTheirEntry has an entry whose sum is right, with a record that is not. Nobody knows
// whether it had a prompt, so what follows is read from the next entry on.
func TestDamagedRecordsEndTheirEntry(t *testing.T) {
	for _, bad := range []struct {
		Kind
		body any
	}{
		{KindBooked, "text"},
		{KindBooked, map[int]any{2: -1}},
		{KindBooked, map[int]any{1: map[int]any{4: []byte{1}}}},
		{KindBooked, map[int]any{7: 77}},
		{KindBound, map[int]any{6: 99}},
		{KindWorker, strings.Repeat("a", maxText+1)},
		{KindTenant, map[int]any{2: []map[int]any{{3: -1}}}},
		{KindQuota, map[int]any{4: 2}},
		{KindPaid, map[int]any{3: -1}},
		{KindState, map[string]any{"Workers": make([]int, maxWorkers+1)}},
		{KindEnded, map[int]any{3: -2}},
		{KindAnswered, map[int]any{2: -2}},
	} {
		var e Encoder
		write(&e, records()[:3])
		writeRaw(t, &e, bad.Kind, bad.body)
		write(&e, records()[4:])
		log := slices.Clone(e.Entry())
		e.Write(&records()[4], nil)
		if all, damage := readAll(t, append(log, e.Entry()...)); len(all) != 4 || damage != (Damage{Records: 1}) {
			t.Errorf("%v: %d records, %+v", bad, len(all), damage)
		}
	}
}

// keeping has a journal written to a log while f runs.
func keeping(t testing.TB, path string, most int64, o *Outlet, f func(*Log)) *Log {
	t.Helper()
	l, err := Open(path, most)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err = l.Read(t.Context(), func(*Record) {}); err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		o.Keep(ctx, l, &Source{
			Head: func() *Head { return &Head{Seed: 1} }, Dial: named, State: func() *State { return new(State) },
			Bindings: func(e *Encoder, at time.Time, _ time.Duration) {
				e.Worker(at, 1, named(1))
				bound := &affinity.Saved{Key: affinity.Key{8}, Want: affinity.Want{TTL: time.Hour}}
				e.Write(&Record{Kind: KindBound, At: at, Target: kvscore.Target{Worker: 1}, Body: bound}, nil)
			},
			Failed: func(err error) { t.Error(err) },
		})
	})
	f(l)
	end()
	wg.Wait()
	return l
}

func kinds(t testing.TB, path string) (n map[Kind]int, d Damage) {
	t.Helper()
	l, err := Open(path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n = make(map[Kind]int)
	if d, err = l.Read(t.Context(), func(r *Record) { n[r.Kind]++ }); err != nil {
		t.Fatal(err)
	}
	return n, d
}

// TestLogIsItsOwnersAlone opens a log that others may read, with a directory where the older file is.
func TestLogIsItsOwnersAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chmod(path, 0o666), os.Mkdir(path+older, 0o700)); err != nil {
		t.Fatal(err)
	}
	l, err := Open(path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, _ = l.Read(t.Context(), func(*Record) {})
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 || l.Status().Bytes != 0 {
		t.Errorf("%v, mode %v, %d bytes", err, info.Mode(), l.Status().Bytes)
	}
}

// TestLogIsBounded writes more than the log keeps. The bindings are in what it keeps.
func TestLogIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "deeper", "journal")
	w := newWorld(3)
	const most = 64 << 10
	keeping(t, path, most, w.outlet, func(*Log) {
		for range 8 {
			for range 100 {
				w.turn(time.Now())
			}
			time.Sleep(150 * time.Millisecond)
		}
	})
	bytes := int64(0)
	for _, name := range []string{path, path + ".1"} {
		info, err := os.Stat(name)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatal(err, info)
		}
		bytes += info.Size()
	}
	n, damage := kinds(t, path)
	if bytes > 2*most || n[KindEpoch] != 2 || n[KindBound] != 2 || n[KindEnded] < 50 || n[KindEnded] == 800 || damage != (Damage{}) {
		t.Errorf("%d bytes, %v, %+v", bytes, n, damage)
	}
}

// TestLogsGoOn ends a log in all the ways in which a process can end, and goes on with it.
func TestLogsGoOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	var ended int
	for i, harm := range []func([]byte) []byte{
		func(b []byte) []byte { return b },
		func(b []byte) []byte { return append(b, 200, 0, 0, 0, 1, 2, 3) },          // half an entry
		func(b []byte) []byte { return append(b, 200) },                            // half a length
		func(b []byte) []byte { return append(b, 0xff, 0xff, 0xff, 0xff, 1, 2) },   // no length
		func(b []byte) []byte { return append(b, bytes.Repeat([]byte{0}, 50)...) }, // as after a power cut
	} {
		w := newWorld(uint64(i))
		keeping(t, path, 1<<20, w.outlet, func(*Log) {
			for range 10 {
				w.turn(time.Now())
			}
		})
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		n, damage := kinds(t, path)
		if ended += 10; n[KindEnded] != ended || damage != (Damage{}) {
			t.Errorf("%d: %v, want %d ends, %+v", i, n, ended, damage)
		}
		if err = os.WriteFile(path, harm(b), 0o600); err != nil {
			t.Fatal(err)
		}
		if h, _, err := ReadHead(path); err != nil || h.Seed != 1 {
			t.Errorf("%d: %+v, %v", i, h, err)
		}
	}
}

// TestFullJournalLosesRecords gathers more than there is room for, without a log that takes it.
func TestFullJournalLosesRecords(t *testing.T) {
	var j Journal
	if id := j.Booked(time.Now(), kvscore.Target{}, new(cache.Prompt), new(cache.View), false, 0, kvscore.PhaseWhole); id != 0 {
		t.Error("it gathers though no log takes it")
	}
	o, other := j.Open(false), j.Open(true)
	for range maxRecords + 5 {
		j.Used(affinity.Key{1})
	}
	if o.Lost() != 5 || other.Lost() != 5 {
		t.Errorf("%d and %d records are lost", o.Lost(), other.Lost())
	}
	other.take()
	j.Used(affinity.Key{1})
	if b := other.take(); o.Lost() != 6 || other.Lost() != 5 || len(b.records) != 1 {
		t.Errorf("%d and %d records are lost, %d wait", o.Lost(), other.Lost(), len(b.records))
	}
	o.take()
	p := &cache.Prompt{Blocks: make([]uint64, maxWaiting+1)}
	if j.Booked(time.Now(), kvscore.Target{}, p, new(cache.View), false, 0, kvscore.PhaseWhole); o.Lost() != 7 {
		t.Errorf("%d records are lost", o.Lost())
	}
	o.Close()
	other.Close()
	if j.on.Load() {
		t.Error("it gathers on")
	}
}

// TestFailedWritesHarmNothing has a disk that is full for a while.
func TestFailedWritesHarmNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	w := newWorld(5)
	l, err := Open(path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	good := l.file
	failed := 0
	k := keeper{outlet: w.outlet, log: l, source: &Source{
		Dial: named, State: func() *State { return new(State) }, Failed: func(error) { failed++ }, Head: func() *Head { return new(Head) },
		Bindings: func(e *Encoder, at time.Time, _ time.Duration) {
			e.Worker(at, 1, named(1))
			e.Write(&Record{Kind: KindResponse, At: at, Target: kvscore.Target{Worker: 1}, Body: new(Response)}, nil)
		},
	}}
	k.encoder.out = k.append
	k.encoder.StartEpoch(time.UnixMilli(0), &Head{})
	for i := range 9 {
		if l.file = good; i%3 == 0 {
			l.file, _ = os.Open(os.DevNull) // cannot be written
		}
		k.retry = time.Time{}
		w.turn(time.Now())
		k.write(time.Now())
	}
	l.file = good
	l.Close()
	if n, damage := kinds(t, path); failed != 3 || n[KindEnded] != 6 || n[KindResponse] != 3 || damage != (Damage{}) || l.Status().Errors != 3 {
		t.Errorf("%d failures, %v, %+v", failed, n, damage)
	}
}

// FuzzRead reads anything, alone and as the records of an entry whose sum is right.
func FuzzRead(f *testing.F) {
	var e Encoder
	write(&e, records())
	f.Add(slices.Clone(e.Entry()))
	w := newWorld(1)
	for range 5 {
		w.turn(time.UnixMilli(1))
	}
	w.outlet.Write(&e, named)
	f.Add(slices.Clone(e.entry.Bytes()[headBytes:]))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, log := range [][]byte{b, entryOf(b)} {
			_, _, err := Read(bytes.NewReader(log), func(r *Record) bool {
				if p := r.Booking; p != nil && p.Prompt != nil {
					if n := len(p.Prompt.Append(nil)); n != p.Prompt.Len() || n > maxBlocks {
						t.Errorf("%d blocks of %d", n, p.Prompt.Len())
					}
				}
				return true
			})
			if err != nil {
				t.Error(err)
			}
		}
	})
}

// entryOf returns an entry of records.
func entryOf(b []byte) []byte {
	var e Encoder
	e.StartEpoch(time.UnixMilli(0), &Head{})
	e.Worker(time.UnixMilli(0), 1, "a:1")
	e.entry.Write(b)
	return e.Entry()
}

// BenchmarkJournal compares a request's part in the journal with nothing, and measures a log.
func BenchmarkJournal(b *testing.B) {
	w := newWorld(2)
	p := &cache.Prompt{Blocks: w.some(256), BlockTokens: 16, Tokens: 4096}
	v := &cache.View{Findings: cache.Findings{Tokens: p.Tokens, Known: cache.Known{Blocks: 240}}}
	b.Run("request", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			id := w.Booked(time.Now(), kvscore.Target{Worker: 1}, p, v, true, 100, kvscore.PhaseWhole)
			w.Used(affinity.Key{1})
			w.Ended(id, true, 101, kvscore.Counts{Prompt: 4096}, nil)
			if i%1000 == 0 {
				b.StopTimer()
				w.outlet.batch.records, w.outlet.batch.blocks = w.outlet.batch.records[:0], w.outlet.batch.blocks[:0]
				b.StartTimer()
			}
		}
	})
	b.Run("encode", func(b *testing.B) {
		var e Encoder
		e.StartEpoch(time.UnixMilli(0), &Head{})
		bytes, n := 0, 0
		for b.Loop() {
			w.turn(time.Now())
			w.outlet.Write(&e, named)
			bytes += len(e.Entry())
			if n++; e.Full() {
				e.StartEpoch(time.UnixMilli(0), &Head{})
			}
		}
		b.ReportMetric(float64(bytes)/float64(n), "bytes/request")
	})
}
