package pool

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// keepingSettings are those of a pool with some workers and a journal.
func keepingSettings(dials ...string) *Settings {
	s := &Settings{Upstreams: make(map[string]bool)}
	for _, dial := range dials {
		s.Upstreams[dial] = true
	}
	return s.WithDefaults()
}

// keeping starts a pool that keeps its journal in a file.
func keeping(t testing.TB, file string, s *Settings) *Pool {
	t.Helper()
	p, err := New("kept", s, noCloser)
	if err != nil {
		t.Fatal(err)
	}
	p.Recall(file)
	for _, w := range p.All() {
		w.MarkProbed()
	}
	p.servingSince.Store(time.Now().Unix())
	p.KeepJournal(Journal{File: file, MaxSize: s.Journal.MaxSize})
	awaitJournal(t, p)
	return p
}

// awaitJournal waits until the pool has restored its journal, and writes it.
func awaitJournal(t testing.TB, p *Pool) {
	t.Helper()
	eventually(t, "there is no journal", func() bool { return p.JournalState().On })
}

// awaitHead waits until the head of a new journal is in its file, as an entry of its own.
func awaitHead(t testing.TB, p *Pool) {
	t.Helper()
	eventually(t, "the journal has no head", func() bool { return p.JournalState().Bytes > 0 })
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

// use binds a session and computes a prompt on a worker.
func use(t testing.TB, p *Pool, session string, dial string, blocks int) {
	t.Helper()
	key := p.Secret().Session(p.Secret().Identity(session), affinity.Tenant{}, "")
	target := p.Worker(dial).Target(0)
	if _, _, err := p.Sessions.Bind(key, 0, affinity.Want{Target: target, TTL: time.Minute}); err != nil {
		t.Fatal(err)
	}
	r := promptOf(p, session, blocks)
	var sel kvscore.Selection
	_, l := p.Scheduler.Select(time.Now(), r, p.Scheduler.Refs(target), 0, new(kvscore.LeastLoad), &sel)
	l.End(true, nil)
}

func promptOf(p *Pool, text string, blocks int) *kvscore.Request {
	r := &kvscore.Request{Prompt: cache.Prompt{Root: p.keys.Load().Seed, BlockTokens: 16, Tokens: int64(16 * blocks)}}
	for i := range blocks {
		r.Blocks = append(r.Blocks, p.keys.Load().Seed^uint64(i)^xxh3.HashString(text))
	}
	return r
}

// boundDial returns the address that a session is bound to, empty if it is not.
func boundDial(t testing.TB, p *Pool, session string) string {
	t.Helper()
	b, ok := p.Sessions.Peek(p.Secret().Session(p.Secret().Identity(session), affinity.Tenant{}, ""))
	for _, w := range p.All() {
		if ok && w.ID == b.Target.Worker {
			return w.Dial
		}
	}
	return ""
}

func cachedOn(p *Pool, dial string) int64 {
	return p.Load(time.Now(), p.Worker(dial)).CachedTokens
}

const one, two, removed = "10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"

// TestPoolSurvivesARestart ends a pool and starts it again, without one of its workers. The
// id of another one has changed.
func TestPoolSurvivesARestart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "journal")
	old := keeping(t, file, keepingSettings(one, two, removed))
	old.begin(old.Worker(one), "life 1")
	use(t, old, "a", one, 20)
	use(t, old, "bb", two, 30)
	use(t, old, "ccc", removed, 40)
	old.Responses.Keep("resp", old.Worker(two).Target(0), old.Secret().Identity("bb"))
	old.Ratios.Learn("m", []uint64{1, 2, 3}, 0, 64, 50)
	weights := *old.Ratios.Weights("m", 64).Kinds
	version := old.Sessions.Changes()
	if err := old.Destruct(); err != nil {
		t.Fatal(err)
	}

	s := keepingSettings(one, two)
	s.Workers[two] = worker.Settings{Dial: two, ID: 77}
	p := keeping(t, file, s)
	defer p.Destruct()
	if got := p.JournalState().Restored; got.Sessions != 2 || got.Responses != 1 || got.CachedTokens != 16*50 {
		t.Errorf("restored %+v", got)
	}
	if *p.keys.Load() != *old.keys.Load() || p.Hashing().Seed != old.keys.Load().Seed {
		t.Error("another secret or seed")
	}
	if a, b, c := boundDial(t, p, "a"), boundDial(t, p, "bb"), boundDial(t, p, "ccc"); a != one || b != two || c != "" {
		t.Errorf("the sessions are at %q, %q and %q", a, b, c)
	}
	if target, _, ok := p.Responses.Find("resp", false); !ok || target.Worker != 77 {
		t.Errorf("the response is on %v", target)
	}
	if got := *p.Ratios.Weights("m", 64).Kinds; slices.MaxFunc(slices.Collect(maps.Keys(differences(got, weights))), func(a, b int32) int { return int(a - b) }) > 1 {
		t.Errorf("ratios %v, want %v", got, weights)
	}
	if cachedOn(p, one) != 320 || cachedOn(p, two) != 480 {
		t.Errorf("%d and %d tokens are cached", cachedOn(p, one), cachedOn(p, two))
	}
	if p.Sessions.Changes() <= version {
		t.Error("versions recur")
	}
	p.begin(p.Worker(one), "life 1")
	if cachedOn(p, one) != 320 {
		t.Error("an engine that has not restarted has lost its cache")
	}
	p.begin(p.Worker(one), "life 2")
	if cachedOn(p, one) != 0 || boundDial(t, p, "a") != one {
		t.Error("an engine that has restarted has a cache, or lost its sessions")
	}
}

// differences returns by how much numbers differ.
func differences[A ~[32]int32](a, b A) map[int32]bool {
	d := map[int32]bool{0: true}
	for i := range a {
		d[max(a[i]-b[i], b[i]-a[i])] = true
	}
	return d
}

// TestDynamicWorkersSurvive has workers that no configuration names. They count as upstreams
// only when a source names them again.
func TestDynamicWorkersSurvive(t *testing.T) {
	dynamic := func() *Settings {
		s := keepingSettings()
		s.Others = true
		return s
	}
	file := filepath.Join(t.TempDir(), "journal")
	old := keeping(t, file, dynamic())
	use(t, old, "a", one, 20)
	old.Worker(one).See(time.Now().Unix() - 100)
	old.Destruct()
	p := keeping(t, file, dynamic())
	defer p.Destruct()
	p.lastRequest.Store(time.Now().Unix())
	if got := p.JournalState().Restored; got.Sessions != 1 || got.CachedTokens != 320 {
		t.Errorf("restored %+v", got)
	}
	if boundDial(t, p, "a") != one || p.IsUpstream(p.Settings.Load(), p.Worker(one)) {
		t.Errorf("the session is at %q", boundDial(t, p, "a"))
	}
}

// TestEngineRestartedBeforeTheCacheIsRestored has an engine that reports another start first.
func TestEngineRestartedBeforeTheCacheIsRestored(t *testing.T) {
	file := filepath.Join(t.TempDir(), "journal")
	old := keeping(t, file, keepingSettings(one))
	old.begin(old.Worker(one), "life 1")
	use(t, old, "a", one, 20)
	old.Destruct()

	p, err := New("kept", keepingSettings(one), noCloser)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Destruct()
	p.Recall(file)
	p.Worker(one).MarkProbed()
	p.begin(p.Worker(one), "life 2")
	p.KeepJournal(Journal{File: file, MaxSize: 64 << 20})
	awaitJournal(t, p)
	if cachedOn(p, one) != 0 || boundDial(t, p, "a") != one {
		t.Errorf("%d tokens are cached, and the session is at %q", cachedOn(p, one), boundDial(t, p, "a"))
	}
}

// TestUselessJournals starts pools on journals that are damaged, foreign, old or from the future.
func TestUselessJournals(t *testing.T) {
	file := filepath.Join(t.TempDir(), "journal")
	old := keeping(t, file, keepingSettings(one))
	awaitHead(t, old)
	use(t, old, "a", one, 20)
	old.Destruct()
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name     string
		change   func([]byte) []byte
		set      func(*Settings)
		sessions int
		cached   int64
		recalled bool
	}{
		{"whole", nil, nil, 1, 320, true},
		{"empty", func([]byte) []byte { return nil }, nil, 0, 0, false},
		{"truncated head", func(b []byte) []byte { return b[:20] }, nil, 0, 0, false},
		{"foreign version", func(b []byte) []byte { b[4] = 99; return b }, nil, 0, 0, false},
		{"head alone", func(b []byte) []byte { return b[:12+binary.LittleEndian.Uint32(b)] }, nil, 0, 0, true},
		{"a text", func([]byte) []byte { return bytes.Repeat([]byte("no journal"), 1000) }, nil, 0, 0, false},
		{"other text blocks", nil, func(s *Settings) { s.TextBlock = 32 }, 1, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := slices.Clone(good)
			if c.change != nil {
				b = c.change(b)
			}
			if err := os.WriteFile(file, b, 0o600); err != nil {
				t.Fatal(err)
			}
			s := keepingSettings(one)
			if c.set != nil {
				c.set(s)
			}
			p := keeping(t, file, s)
			if kept, _ := os.ReadFile(file + ".unread"); !c.recalled && !bytes.Equal(kept, b) { // it may be somebody else's
				t.Errorf("%d of %d bytes are kept", len(kept), len(b))
			}
			got := p.JournalState().Restored
			if got.Sessions != c.sessions || got.CachedTokens != c.cached || (*p.Secret() == *old.Secret()) != c.recalled {
				t.Errorf("restored %+v, the secret is the same: %v", got, *p.Secret() == *old.Secret())
			}
			use(t, p, "later", one, 30)
			p.Destruct()
			p = keeping(t, file, s)
			if boundDial(t, p, "later") != one {
				t.Error("the journal does not go on")
			}
			p.Destruct()
		})
	}
}

// TestClocksMayStep restores journals from the future and from long ago.
func TestClocksMayStep(t *testing.T) {
	for _, c := range []struct {
		ago      time.Duration
		sessions int
		cached   int64
	}{{-24 * time.Hour, 1, 320}, {10 * time.Second, 1, 320}, {2 * time.Minute, 0, 320}, {2 * time.Hour, 0, 0}} {
		file := filepath.Join(t.TempDir(), "journal")
		old := keeping(t, file, keepingSettings(one))
		use(t, old, "a", one, 20)
		old.Destruct()
		at := time.Now().Add(-c.ago)
		shift(t, file, -c.ago)
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
		p := keeping(t, file, keepingSettings(one))
		got := p.JournalState().Restored
		if got.Sessions != c.sessions || got.Expired != 1-c.sessions || got.CachedTokens != c.cached {
			t.Errorf("a journal of %v ago: restored %+v", c.ago, got)
		}
		if v := p.Sessions.Changes(); v <= affinity.Version(at.UnixNano()) {
			t.Errorf("version %d, which the run before may have used", v)
		}
		p.Destruct()
	}
}

// shift changes the times of a journal's entries.
func shift(t testing.TB, file string, by time.Duration) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(b); {
		end := at + 4 + int(binary.LittleEndian.Uint32(b[at:]))
		ms := binary.LittleEndian.Uint64(b[at+5:])
		binary.LittleEndian.PutUint64(b[at+5:], ms+uint64(by.Milliseconds())) //nolint:gosec // wraps around
		binary.LittleEndian.PutUint64(b[end:], xxh3.Hash(b[at+4:end]))
		at = end + 8
	}
	if err = os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestJournalThatCannotBeOpened has a file that another pool uses, and one that is a directory.
func TestJournalThatCannotBeOpened(t *testing.T) {
	t.Parallel() // it waits
	file := filepath.Join(t.TempDir(), "journal")
	first := keeping(t, file, keepingSettings(one))
	second, err := New("other", keepingSettings(one), noCloser)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{file, filepath.Dir(file)} {
		second.KeepJournal(Journal{File: name, MaxSize: 64 << 20})
		select {
		case <-second.kept.ended:
		case <-time.After(2 * openWithin):
			t.Fatal("it waits")
		}
		use(t, second, name, one, 20)
	}
	if second.JournalState().On || !first.JournalState().On {
		t.Error("two pools have one journal")
	}
	second.Destruct()
	first.Destruct()
}

// TestJournalIsTurnedOff writes nothing before the configuration serves, nor after it was turned off.
func TestJournalIsTurnedOff(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "journal")
	p, err := New("kept", keepingSettings(one), noCloser)
	if err != nil {
		t.Fatal(err)
	}
	p.Recall(file)
	use(t, p, "a", one, 20)
	if all, _ := os.ReadDir(dir); len(all) > 0 {
		t.Errorf("%v are there before the configuration serves", all)
	}
	p.KeepJournal(Journal{File: file, MaxSize: 64 << 20})
	awaitJournal(t, p)
	use(t, p, "bb", one, 20)
	p.KeepJournal(Journal{})
	use(t, p, "ccc", one, 20)
	p.Destruct()
	p = keeping(t, file, keepingSettings(one))
	defer p.Destruct()
	if boundDial(t, p, "bb") != one || boundDial(t, p, "ccc") != "" {
		t.Errorf("the sessions are at %q and %q", boundDial(t, p, "bb"), boundDial(t, p, "ccc"))
	}
}

// TestRequestsBesideTheJournal serves requests while a pool is restored.
func TestRequestsBesideTheJournal(t *testing.T) {
	file := filepath.Join(t.TempDir(), "journal")
	old := keeping(t, file, keepingSettings(one, two))
	for i := range 3000 {
		use(t, old, fmt.Sprint("old", i), []string{one, two}[i%2], 20+i%50)
	}
	old.Destruct()
	p, err := New("kept", keepingSettings(one, two), noCloser)
	if err != nil {
		t.Fatal(err)
	}
	p.Recall(file)
	for _, w := range p.All() {
		w.MarkProbed()
	}
	p.KeepJournal(Journal{File: file, MaxSize: 64 << 20})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 500 {
				name := fmt.Sprint("live", g, i)
				use(t, p, name, one, 20)
				if boundDial(t, p, name) != one {
					t.Errorf("%s is not bound", name)
				}
			}
		})
	}
	wg.Wait()
	awaitJournal(t, p)
	if got := p.JournalState().Restored; got.Sessions != 3000 || p.Sessions.Len() != 5000 {
		t.Errorf("restored %+v, %d sessions", got, p.Sessions.Len())
	}
	p.Destruct()
}

// begin has a worker's engine report its start, as discovery does.
func (p *Pool) begin(w *worker.Worker, life string) {
	before := w.Engine().Info.BootID
	p.SetInfo(w, engine.Info{Type: engine.VLLM, BootID: life})
	if before != "" && before != life {
		p.ClearCache(w, observe.ClearedRestarted)
	}
}

// TestDamagedJournalCostsItsRecords starts pools on files whose records refer to what is missing.
func TestDamagedJournalCostsItsRecords(t *testing.T) {
	file := filepath.Join(t.TempDir(), "journal")
	old := keeping(t, file, keepingSettings(one))
	awaitHead(t, old)
	use(t, old, "a", one, 20)
	old.Destruct()
	bad, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	bad[30] ^= 1 // the older file has no head
	if err := os.WriteFile(file+".1", bad, 0o600); err != nil {
		t.Fatal(err)
	}
	keeping(t, file, keepingSettings(one)).Destruct()

	var j journal.Journal // a new epoch while a request is under way
	o := j.Open(false)
	var e journal.Encoder
	var b bytes.Buffer
	write := func() {
		o.Write(&e, func(uint64) string { return one })
		b.Write(e.Entry())
	}
	e.NewRun()
	e.StartEpoch(time.Now(), &journal.Head{TextBlock: 64})
	p := &cache.Prompt{Root: 1, Blocks: []uint64{1, 2}, BlockTokens: 16, Tokens: 32}
	id := j.Booked(time.Now(), kvscore.Target{Worker: 1}, p, &cache.View{Findings: cache.Findings{Tokens: 32}}, true, 0, kvscore.PhaseWhole)
	write()
	e.StartEpoch(time.Now(), &journal.Head{TextBlock: 64})
	j.Ended(id, true, 1, kvscore.Counts{Prompt: 32}, nil)
	write()
	other := file + "2"
	if err := os.WriteFile(other, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	keeping(t, other, keepingSettings(one)).Destruct()
}
