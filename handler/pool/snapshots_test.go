package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/snapshot"
	"github.com/caddy-kvrouter/kvrouter/handler/snapshot/snapshottest"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// keepingSettings are those of a pool with two workers that writes snapshots.
func keepingSettings(dials ...string) *Settings {
	s := &Settings{Persist: time.Hour, Upstreams: make(map[string]bool)}
	for _, dial := range dials {
		s.Upstreams[dial] = true
	}
	return s.WithDefaults()
}

// keeping starts a pool that keeps its snapshots in the storage.
func keeping(t testing.TB, store *snapshottest.Memory, s *Settings) *Pool {
	t.Helper()
	p, err := New("kept", s, func(*Pool, *Worker) Watch { return new(confirming) })
	if err != nil {
		t.Fatal(err)
	}
	at := snapshot.At(store, "router", "kept")
	p.Recall(at)
	for _, w := range p.All() {
		w.MarkProbed()
	}
	p.servingSince.Store(time.Now().Unix())
	p.Persist(at)
	return p
}

// awaitRestored waits until the pool has restored its snapshot.
func awaitRestored(t testing.TB, p *Pool) SnapshotState {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		p.snapshots.mu.Lock()
		done := p.snapshots.restored
		p.snapshots.mu.Unlock()
		if done {
			return p.Snapshots()
		}
		if time.Now().After(deadline) {
			t.Fatal("the snapshot is not restored")
		}
	}
}

// use binds a session and computes a prompt on a worker.
func use(t testing.TB, p *Pool, session string, dial string, blocks int) {
	t.Helper()
	key := p.Secret.Session(p.Secret.Identity(session), affinity.Tenant{}, "")
	target := p.Worker(dial).Target(0)
	if _, ok, err := p.Sessions.Bind(t.Context(), key, 0, affinity.Want{Target: target, TTL: time.Minute}); !ok || err != nil {
		t.Fatal(ok, err)
	}
	r := promptOf(p, session, blocks)
	var sel kvscore.Selection
	_, l := p.Scheduler.Select(time.Now(), r, []kvscore.Target{target}, 0, new(kvscore.LeastLoad), &sel)
	l.End(true, nil)
}

func promptOf(p *Pool, text string, blocks int) *kvscore.Request {
	r := &kvscore.Request{Prompt: cache.Prompt{Root: p.seed, BlockTokens: 16, Tokens: int64(16 * blocks)}}
	for i := range blocks {
		r.Blocks = append(r.Blocks, p.seed^uint64(i)<<8^uint64(len(text)))
	}
	return r
}

// homeOf returns the address that a session is bound to, empty if it is not.
func homeOf(t testing.TB, p *Pool, session string) string {
	t.Helper()
	b, ok, _ := p.Sessions.Peek(t.Context(), p.Secret.Session(p.Secret.Identity(session), affinity.Tenant{}, ""))
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

const one, two, gone = "10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"

// TestPoolSurvivesARestart ends a pool and starts it again, without one of its workers. The
// id of another one has changed.
func TestPoolSurvivesARestart(t *testing.T) {
	store := new(snapshottest.Memory)
	old := keeping(t, store, keepingSettings(one, two, gone))
	awaitRestored(t, old)
	old.begin(old.Worker(one), "life 1")
	use(t, old, "a", one, 20)
	use(t, old, "bb", two, 30)
	use(t, old, "ccc", gone, 40)
	old.Responses.Keep("resp", old.Worker(two).Target(0), old.Secret.Identity("bb"))
	old.Ratios.Learn("m", []uint64{1, 2, 3}, 0, 64, 50)
	weights := *old.Ratios.Weights("m", 64).Kinds
	version := old.Sessions.Changes()
	if err := old.Destruct(); err != nil {
		t.Fatal(err)
	}

	s := keepingSettings(one, two)
	s.Workers[two] = WorkerSettings{Dial: two, ID: 77}
	p := keeping(t, store, s)
	defer p.Destruct()
	state := awaitRestored(t, p)
	if got := state.Restored; got.Sessions != 2 || got.Responses != 1 || got.CachedTokens != 16*50 {
		t.Errorf("restored %+v", got)
	}
	if p.Secret != old.Secret || p.seed != old.seed || p.Hashing().Seed != old.seed {
		t.Error("another secret or seed")
	}
	if a, b, c := homeOf(t, p, "a"), homeOf(t, p, "bb"), homeOf(t, p, "ccc"); a != one || b != two || c != "" {
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
	if cachedOn(p, one) != 0 || homeOf(t, p, "a") != one {
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
	store := new(snapshottest.Memory)
	old := keeping(t, store, dynamic())
	awaitRestored(t, old)
	use(t, old, "a", one, 20)
	old.Worker(one).seen.Store(time.Now().Unix() - 100)
	old.Destruct()
	p := keeping(t, store, dynamic())
	defer p.Destruct()
	p.lastRequest.Store(time.Now().Unix())
	if got := awaitRestored(t, p).Restored; got.Sessions != 1 || got.CachedTokens != 320 {
		t.Errorf("restored %+v", got)
	}
	if homeOf(t, p, "a") != one || p.IsUpstream(p.Settings.Load(), p.Worker(one)) {
		t.Errorf("the session is at %q", homeOf(t, p, "a"))
	}
}

// TestEngineRestartedBeforeTheCacheIsRestored has an engine that reports another start first.
func TestEngineRestartedBeforeTheCacheIsRestored(t *testing.T) {
	store := new(snapshottest.Memory)
	old := keeping(t, store, keepingSettings(one))
	awaitRestored(t, old)
	old.begin(old.Worker(one), "life 1")
	use(t, old, "a", one, 20)
	old.Destruct()

	p, err := New("kept", keepingSettings(one), unwatched)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Destruct()
	at := snapshot.At(store, "router", "kept")
	p.Recall(at)
	p.Worker(one).MarkProbed()
	p.begin(p.Worker(one), "life 2")
	p.Persist(at)
	awaitRestored(t, p)
	if cachedOn(p, one) != 0 || homeOf(t, p, "a") != one {
		t.Errorf("%d tokens are cached, and the session is at %q", cachedOn(p, one), homeOf(t, p, "a"))
	}
}

// confirming is a watch that keeps the number of right predictions.
type confirming struct {
	noWatch
	n int
}

func (c *confirming) Confirmed() int { return c.n }
func (c *confirming) Recall(n int)   { c.n = n }

// TestConfirmationsAreRestored lets wrong predictions count after the start: the restored cache
// model can be wrong.
func TestConfirmationsAreRestored(t *testing.T) {
	store := new(snapshottest.Memory)
	old := keeping(t, store, keepingSettings(one))
	awaitRestored(t, old)
	use(t, old, "a", one, 100)
	old.Worker(one).Watch().Recall(7)
	old.Destruct()

	p := keeping(t, store, keepingSettings(one))
	defer p.Destruct()
	awaitRestored(t, p)
	if n := p.Worker(one).Watch().Confirmed(); n != 7 || cachedOn(p, one) != 1600 {
		t.Errorf("%d predictions were right, and %d tokens are cached", n, cachedOn(p, one))
	}
}

// TestUselessSnapshots starts pools on snapshots that are damaged, foreign or old.
func TestUselessSnapshots(t *testing.T) {
	store := new(snapshottest.Memory)
	old := keeping(t, store, keepingSettings(one))
	awaitRestored(t, old)
	use(t, old, "a", one, 20)
	old.Destruct()
	good := maps.Clone(store.Values)
	head, part := "kv_router/router/kept/head", "kv_router/router/kept/0/1"
	for _, c := range []struct {
		name     string
		change   func()
		set      func(*Settings)
		sessions int
		cached   int64
		recalled bool
	}{
		{"whole", func() {}, nil, 1, 320, true},
		{"no head", func() { delete(store.Values, head) }, nil, 0, 0, false},
		{"truncated head", func() { store.Values[head] = store.Values[head][:20] }, nil, 0, 0, false},
		{"foreign version", func() { store.Values[head][4] = 99 }, nil, 0, 0, false},
		{"no part", func() { delete(store.Values, part) }, nil, 0, 0, true},
		{"damaged part", func() { store.Values[part][100]++ }, nil, 0, 0, true},
		{"huge part", func() { store.Values[part] = make([]byte, 10<<20) }, nil, 0, 0, true},
		{"other text blocks", func() {}, func(s *Settings) { s.TextBlock = 32 }, 1, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			store.Values = make(map[string][]byte)
			for key, v := range good {
				store.Values[key] = slices.Clone(v)
			}
			c.change()
			s := keepingSettings(one)
			if c.set != nil {
				c.set(s)
			}
			p := keeping(t, store, s)
			defer p.Destruct()
			got := awaitRestored(t, p).Restored
			if got.Sessions != c.sessions || got.CachedTokens != c.cached || (p.Secret == old.Secret) != c.recalled {
				t.Errorf("restored %+v, the secret is the same: %v", got, p.Secret == old.Secret)
			}
		})
	}
}

// TestClocksMayStep restores snapshots from the future and from long ago.
func TestClocksMayStep(t *testing.T) {
	for _, c := range []struct {
		ago      time.Duration
		sessions int
		cached   int64
	}{{-24 * time.Hour, 1, 320}, {10 * time.Second, 1, 320}, {2 * time.Minute, 0, 320}, {2 * time.Hour, 0, 0}} {
		store := new(snapshottest.Memory)
		old := keeping(t, store, keepingSettings(one))
		awaitRestored(t, old)
		use(t, old, "a", one, 20)
		w := snapshot.NewWriter(t.Context(), snapshot.At(store, "router", "kept"), nil)
		old.write(w, time.Now())
		future := affinity.Version(time.Now().Add(24 * time.Hour).UnixNano())
		if _, err := w.Finish(snapshot.Head{Saved: time.Now().Add(-c.ago), Secret: old.Secret, Seed: old.seed, TextBlock: defaultTextBlock, Version: future}); err != nil {
			t.Fatal(err)
		}
		p := keeping(t, store, keepingSettings(one))
		got := awaitRestored(t, p).Restored
		if got.Sessions != c.sessions || got.Expired != 1-c.sessions || got.CachedTokens != c.cached {
			t.Errorf("a snapshot of %v ago: restored %+v", c.ago, got)
		}
		if v := p.Sessions.Changes(); v <= future {
			t.Errorf("version %d, which the run before may have used", v)
		}
		p.Destruct()
		old.Destruct()
	}
}

// TestStorageThatFailsIsOneCondition has a storage that fails, and then hangs.
func TestStorageThatFailsIsOneCondition(t *testing.T) {
	store := &snapshottest.Memory{Fails: errors.New("disk full")}
	p := keeping(t, store, keepingSettings(one))
	awaitRestored(t, p)
	for i := range 3 {
		use(t, p, fmt.Sprint("session ", i), one, 20)
		if err := p.save(t.Context(), time.Second); !errors.Is(err, store.Fails) {
			t.Errorf("%v", err)
		}
	}
	if open := p.Incidents.Open(time.Now()); len(open) != 1 || open[0].What != incidentSnapshots || open[0].Times != 3 || p.Snapshots().Errors != 3 {
		t.Errorf("conditions %+v, %d errors", open, p.Snapshots().Errors)
	}
	hangs := make(chan struct{})
	store.Hang(hangs)
	p.Incidents.end(time.Now().Add(incidentEnd), p.Logger())
	go p.save(context.Background(), time.Second) //nolint:errcheck // it is a condition
	for begun := time.Now(); len(p.Incidents.Open(time.Now())) == 0 && time.Since(begun) < 5*time.Second; time.Sleep(time.Millisecond) {
		p.watchSnapshots(time.Now().Add(2 * saveWithin))
	}
	if len(p.Incidents.Open(time.Now())) != 1 {
		t.Error("nothing shows that the storage hangs")
	}
	begun := time.Now()
	p.Destruct()
	if took := time.Since(begun); took > 2*lastWithin {
		t.Errorf("the end took %v", took)
	}

	begun = time.Now() // a start on a storage that hangs
	fresh, err := New("kept", keepingSettings(one), unwatched)
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Destruct()
	fresh.Recall(snapshot.At(store, "router", "kept"))
	if took := time.Since(begun); took > 2*recallWithin || fresh.Secret == p.Secret {
		t.Errorf("the start took %v", took)
	}
	close(hangs)
}

// TestSnapshotsAreWrittenOnlyIfNeeded writes nothing before Persist, and nothing twice.
func TestSnapshotsAreWrittenOnlyIfNeeded(t *testing.T) {
	store := new(snapshottest.Memory)
	at := snapshot.At(store, "router", "kept")
	p, err := New("kept", keepingSettings(one), unwatched)
	if err != nil {
		t.Fatal(err)
	}
	p.Recall(at)
	use(t, p, "a", one, 20)
	p.flush(lastWithin)
	if n := store.Count(); n != 0 {
		t.Errorf("%d values before the configuration serves", n)
	}
	p.Persist(at)
	awaitRestored(t, p)
	p.flush(lastWithin)
	n := store.Count()
	if n != 2 {
		t.Errorf("%d values, want a part and the head", n)
	}
	p.flush(lastWithin)
	if store.Count() != n {
		t.Error("a snapshot without a change")
	}
	use(t, p, "bb", one, 20)
	p.Persist(nil)
	p.flush(lastWithin)
	if store.Count() != n {
		t.Error("a snapshot after snapshots were turned off")
	}
	p.Persist(at)
	p.Destruct()
	if store.Count() != n+2 {
		t.Errorf("%d values in all, want %d", store.Count(), n+2)
	}
}

// TestRequestsBesideSnapshots serves requests while a pool is restored and written.
func TestRequestsBesideSnapshots(t *testing.T) {
	store := new(snapshottest.Memory)
	old := keeping(t, store, keepingSettings(one, two))
	awaitRestored(t, old)
	for i := range 3000 {
		use(t, old, strings.Repeat("s", i%300)+fmt.Sprint(i), []string{one, two}[i%2], 20+i%50)
	}
	old.Destruct()
	p := keeping(t, store, keepingSettings(one, two))
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 500 {
				name := fmt.Sprint("live", g, i)
				use(t, p, name, one, 20)
				if i%100 == 0 {
					p.flush(lastWithin)
				}
				if homeOf(t, p, name) != one {
					t.Errorf("%s is not bound", name)
				}
			}
		})
	}
	wg.Wait()
	if got := awaitRestored(t, p).Restored; got.Sessions != 3000 {
		t.Errorf("restored %+v", got)
	}
	if n := p.Sessions.Len(); n != 5000 {
		t.Errorf("%d sessions", n)
	}
	p.Destruct()
}

// BenchmarkMillionSessions writes and restores a million sessions, in memory.
func BenchmarkMillionSessions(b *testing.B) {
	for b.Loop() {
		store := new(snapshottest.Memory)
		old := keeping(b, store, keepingSettings(one, two))
		awaitRestored(b, old)
		target := old.Worker(one).Target(0)
		for i := range 1_000_000 {
			key := old.Secret.Session(old.Secret.Identity(fmt.Sprint(i)), affinity.Tenant{}, "")
			old.Sessions.Bind(b.Context(), key, 0, affinity.Want{Target: target, TTL: time.Hour}) //nolint:errcheck // there is room
		}
		begun := time.Now()
		if err := old.save(b.Context(), time.Minute); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(time.Since(begun).Seconds(), "s/snapshot")
		b.ReportMetric(float64(old.Snapshots().Bytes), "bytes/snapshot")
		old.Destruct()
		begun = time.Now()
		p := keeping(b, store, keepingSettings(one, two))
		b.ReportMetric(time.Since(begun).Seconds(), "s/start")
		n := awaitRestored(b, p).Restored.Sessions
		b.ReportMetric(time.Since(begun).Seconds(), "s/restore")
		b.ReportMetric(float64(n), "sessions")
		p.Destruct()
	}
}

// begin has a worker's engine report its start, as discovery does.
func (p *Pool) begin(w *Worker, life string) {
	before := w.Engine().Info.Life
	p.SetInfo(w, engine.Info{Type: engine.VLLM, Life: life})
	if before != "" && before != life {
		p.Restarted(w)
	}
}
