package pool

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"go.uber.org/zap/zapcore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// tell reports a worker's engine to the pool.
func (p *Pool) tell(dial string, told engine.Info) *Worker {
	w := p.Worker(dial)
	p.Learn(w, told)
	p.AgreeOnBlocks()
	return w
}

func TestBlockSizeIsThatOfTheEngines(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}, WorkerSettings{Dial: "b:1"}, WorkerSettings{Dial: "c:1"}))
	want := func(size, ofEngines int) {
		t.Helper()
		if s := p.Settings.Load(); s.BlockSize != size || p.blockSize != ofEngines {
			t.Errorf("block size %d (of the engines %d), want %d (%d)", s.BlockSize, p.blockSize, size, ofEngines)
		}
	}
	want(16, 0)
	p.tell("a:1", engine.Info{Type: engine.VLLM, BlockSize: 32})
	want(32, 32)
	p.tell("b:1", engine.Info{Type: engine.VLLM})
	want(32, 32)
	p.tell("b:1", engine.Info{Type: engine.VLLM, BlockSize: 64})
	want(32, 32) // they disagree
	if in := p.Incidents.byName; len(in) != 1 || in[incidentBlocks] == nil {
		t.Errorf("incidents %+v", in)
	}
	if p.Apply(wanted(WorkerSettings{Dial: "a:1"}, WorkerSettings{Dial: "b:1"}, WorkerSettings{Dial: "c:1"}).WithDefaults()) {
		t.Error("the same settings are said to differ")
	}
	want(32, 32)
	p.tell("a:1", engine.Info{Type: engine.VLLM, BlockSize: 64})
	want(64, 64)
	for _, dial := range []string{"a:1", "b:1"} {
		p.tell(dial, engine.Info{Type: engine.SGLang, BlockSize: 1})
	}
	want(16, 16) // one token each is for no index
	p.tell("a:1", engine.Info{Type: engine.VLLM, BlockSize: 16})
	want(16, 16)
	p.Incidents.byName = nil
	p.tell("b:1", engine.Info{Type: engine.SGLang, BlockSize: 1})
	if in := p.Incidents.byName; len(in) > 0 {
		t.Errorf("pages of 16 tokens and of one do not agree: %+v", in)
	}
	p.tell("b:1", engine.Info{Type: engine.VLLM, BlockSize: 4096})
	want(16, 16) // such blocks are for no index
	if set := p.Settings.Load(); !strings.Contains(set.Contradictions(set.Worker("b:1"), p.Worker("b:1").Engine.Info())["block_size"], "too large") {
		t.Error("no contradiction says so")
	}
	p.Apply(wanted(WorkerSettings{Dial: "a:1"}, WorkerSettings{Dial: "b:1"}).WithDefaults())
	p.Learn(p.Worker("c:1"), engine.Info{Type: engine.VLLM, BlockSize: 64}) // it is no upstream any more
	p.tell("b:1", engine.Info{Type: engine.SGLang, BlockSize: 1})
	if in := p.Incidents.byName; len(in) > 0 {
		t.Errorf("a worker that was removed does not agree: %+v", in)
	}
	own := wanted(WorkerSettings{Dial: "a:1"}, WorkerSettings{Dial: "b:1"}, WorkerSettings{Dial: "c:1"})
	own.BlockSize = 48
	p.Apply(own.WithDefaults())
	want(48, 16)
	p.tell("c:1", engine.Info{Type: engine.VLLM, BlockSize: 128})
	want(48, 16)
}

// TestBlockSizeSourceIsTheEngines has engines that report the default size.
func TestBlockSizeSourceIsTheEngines(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}, WorkerSettings{Dial: "b:1"}))
	if p.KnowsBlockSize() {
		t.Error("the size is known before an engine has reported it")
	}
	for _, dial := range []string{"a:1", "b:1"} {
		p.tell(dial, engine.Info{Type: engine.VLLM, BlockSize: 16})
	}
	if s := p.Settings.Load(); !p.KnowsBlockSize() || s.BlockSize != 16 {
		t.Errorf("block size %d, known from the engines: %t", s.BlockSize, p.KnowsBlockSize())
	}
}

func TestBlockSizes(t *testing.T) {
	for told, want := range map[int]int{1: 16, 8: 16, 10: 20, 16: 16, 32: 32, 128: 128, 4096: 4096} {
		if got := blockSizeFor(told); got != want {
			t.Errorf("engines' %d become %d, want %d", told, got, want)
		}
	}
}

// TestToldRanksAreTargets reports an engine's ranks and capacity. Then the operator overrides
// them, and the engine restarts with fewer.
func TestToldRanksAreTargets(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1", ID: 10}))
	capacities := func(w *Worker) (list []int64) {
		for rank := range 4 {
			if load, ok := p.Scheduler.Load(time.Now(), w.Target(rank)); ok {
				list = append(list, load.CapacityTokens)
			}
		}
		return list
	}
	want := func(what string, list ...int64) {
		t.Helper()
		w := p.Worker("a:1")
		if got := capacities(w); w.Ranks() != len(list) || !slices.Equal(got, list) {
			t.Errorf("%s: %d ranks with %v tokens, want %v", what, w.Ranks(), got, list)
		}
	}
	want("at first", 262144)
	w := p.tell("a:1", engine.Info{Type: engine.VLLM, DPSize: 3, KVTokens: 5000, Life: "1"})
	want("told", 5000, 5000, 5000)
	p.tell("a:1", engine.Info{Type: engine.VLLM, Life: "1"})
	want("told less", 5000, 5000, 5000)
	p.tell("a:1", engine.Info{})
	want("told nothing", 5000, 5000, 5000)
	p.Apply(wanted(WorkerSettings{Dial: "a:1", ID: 10, DPSize: 2, KVTokens: 7000}).WithDefaults())
	want("configured", 7000, 7000)
	p.Apply(wanted(WorkerSettings{Dial: "a:1", ID: 10, KVTokens: 7000}).WithDefaults())
	want("configured in part", 7000, 7000, 7000)
	p.tell("a:1", engine.Info{Type: engine.VLLM, DPSize: 1, Life: "2"})
	want("restarted with one", 7000)
	p.Apply(wanted(WorkerSettings{Dial: "a:1", ID: 10, DPSize: 2, Engine: engine.TRTLLM}).WithDefaults())
	want("of an engine that chooses itself", 262144)
	if p.Worker("a:1") != w {
		t.Error("it is another worker")
	}
}

func TestContradictions(t *testing.T) {
	s := wanted().WithDefaults()
	own := wanted()
	own.BlockSize = 16
	for _, c := range []struct {
		s    *Settings
		set  WorkerSettings
		told engine.Info
		want []string
	}{
		{s, WorkerSettings{Engine: EngineAuto}, engine.Info{Type: engine.VLLM, KVTokens: 5, DPSize: 2, BlockSize: 7}, nil},
		{s, WorkerSettings{Engine: engine.VLLM, KVTokens: 5, DPSize: 2}, engine.Info{}, nil},
		{s, WorkerSettings{Engine: engine.VLLM, KVTokens: 5, DPSize: 2}, engine.Info{Type: engine.SGLang, KVTokens: 6, DPSize: 4}, []string{"dp_size", "engine", "kv_tokens"}},
		{s, WorkerSettings{Engine: EngineAuto, KVTokens: 400000}, engine.Info{KVTokens: 399984}, nil},
		{s, WorkerSettings{Engine: EngineAuto, KVTokens: 400000}, engine.Info{KVTokens: 370000}, []string{"kv_tokens"}},
		{s, WorkerSettings{Engine: EngineAuto}, engine.Info{BlockSize: 1056}, []string{"block_size"}},
		{s, WorkerSettings{Engine: EngineAuto, DPSize: 2}, engine.Info{Type: engine.VLLM, Version: "0.8.5"}, []string{"dp_size"}},
		{s, WorkerSettings{Engine: engine.Other}, engine.Info{Type: engine.SGLang}, nil},
		{s, WorkerSettings{Engine: EngineAuto, DPSize: 2}, engine.Info{Type: engine.LlamaCpp}, []string{"dp_size"}},
		{own.WithDefaults(), WorkerSettings{Engine: EngineAuto}, engine.Info{Type: engine.VLLM, BlockSize: 32}, []string{"block_size"}},
		{own.WithDefaults(), WorkerSettings{Engine: EngineAuto}, engine.Info{Type: engine.SGLang, BlockSize: 1}, nil},
	} {
		var got []string
		for what := range c.s.Contradictions(c.set, c.told) {
			got = append(got, what)
		}
		if slices.Sort(got); !slices.Equal(got, c.want) {
			t.Errorf("%+v, told %+v: %v, want %v", c.set, c.told, got, c.want)
		}
	}
}

// TestRestartsThatAreTold has one engine restart, and then several engines answer
// at its address.
func TestRestartsThatAreTold(t *testing.T) {
	var e engineState
	for i, c := range []struct {
		at                int // seconds
		life              string
		restarted, shared bool
	}{
		{0, "", false, false},
		{0, "a", false, false},
		{15, "a", false, false},
		{30, "", false, false},
		{45, "b", true, false},
		{120, "c", true, false},
		{135, "d", true, true},
		{150, "c", true, true},
		{300, "e", true, false},
	} {
		restarted, shared := e.restarted(time.Unix(1e9+int64(c.at), 0), c.life)
		if restarted != c.restarted || shared != c.shared {
			t.Errorf("%d: after %q restarted: %v, shared: %v, want %+v", i, c.life, restarted, shared, c)
		}
	}
}

// TestRefusedIsLost has connections be refused: whatever the engine is, and
// whatever it tells when it is back, its cache is gone.
func TestRefusedIsLost(t *testing.T) {
	for _, before := range []engine.Info{{}, {Type: engine.VLLM}, {Type: engine.VLLM, Life: "a"}, {Type: engine.LlamaCpp}} {
		p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}))
		w := p.tell("a:1", before)
		p.serve(w).End(true, nil)
		p.RecordOwnRequest(t.Context(), w, 0, reverseproxy.NewDialError(errors.New("dial tcp: i/o timeout")))
		if got := p.cached(w); got != 1600 {
			t.Errorf("%+v: %d tokens are thought to be there after a timeout, want 1600", before, got)
		}
		p.Report(w, Outcome{Kind: OutcomeRefused, Begun: time.Now()})
		if got := p.cached(w); got != 0 {
			t.Errorf("%+v: %d tokens are thought to be there after a refusal", before, got)
		}
	}
}

// TestUnknownIsNotInTheLog looks at what the log says of an engine that tells
// little.
func TestUnknownIsNotInTheLog(t *testing.T) {
	e := zapcore.NewMapObjectEncoder()
	if err := infoFields(engine.Info{Type: engine.VLLM, BlockSize: 16}).MarshalLogObject(e); err != nil {
		t.Fatal(err)
	}
	if want := map[string]any{"type": "vllm", "block_size": int64(16)}; !maps.Equal(e.Fields, want) {
		t.Errorf("the log has %v, want %v", e.Fields, want)
	}
}

// TestUnsureAnswerChangesNothing has an engine fall silent while it is asked.
func TestUnsureAnswerChangesNothing(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}, WorkerSettings{Dial: "b:1"}))
	unsure := engine.Info{Type: engine.Other, Unsure: true}
	if w := p.tell("a:1", unsure); w.Engine.Info() != (engine.Info{Type: engine.Other}) {
		t.Errorf("it is taken for %+v", w.Engine.Info())
	}
	p.tell("b:1", engine.Info{Type: engine.SGLang})
	if w := p.tell("b:1", unsure); w.Engine.Info().Type != engine.SGLang {
		t.Errorf("an SGLang is now taken for %+v", w.Engine.Info())
	}
}

// TestWorkersAreLeftAlone checks the time between probes: in an idle pool, and of a worker
// that needs a key.
func TestWorkersAreLeftAlone(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}))
	w := p.Worker("a:1")
	want := func(what string, d time.Duration) {
		t.Helper()
		if got := p.ModelsInterval(w); got != d {
			t.Errorf("%s: for %v, want %v", what, got, d)
		}
	}
	p.lastRequest.Store(time.Now().Unix())
	want("in use", 0)
	w.Refusals.Store(1)
	want("refused once", 2*ProbeEvery)
	w.Refusals.Store(1 << 30)
	want("refused often", askedLess)
	w.Refusals.Store(0)
	p.lastRequest.Store(time.Now().Add(-idleAfter - time.Minute).Unix())
	want("idle", askedLess)
	p.ServingSince.Store(time.Now().Unix())
	want("just begun", 0)
}

// TestTheSilentAreAskedLessAndLess asks as often as the engine is due in a day.
func TestTheSilentAreAskedLessAndLess(t *testing.T) {
	var e engineState
	asked := 0
	for t := time.Unix(1e9, 0); t.Before(time.Unix(1e9+86400, 0)); t = t.Add(ProbeEvery) {
		if e.Claim(t) {
			asked++
			e.answered(t, false)
		}
	}
	if most := int(24*time.Hour/askedLess) + 10; asked > most || asked < most/2 {
		t.Errorf("asked %d times in a day, want up to %d", asked, most)
	}
}

// TestMirrorIsClearedOnAllRanks clears, and tells of it only if there was
// anything.
func TestMirrorIsClearedOnAllRanks(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1", DPSize: 2}))
	w := p.Worker("a:1")
	p.serve(w).End(true, nil)
	if load := p.Load(time.Now(), w); load.CachedTokens != 1600 || load.CapacityTokens != 2*262144 {
		t.Errorf("load of both ranks %+v", load)
	}
	p.Report(w, Outcome{Kind: OutcomeRefused, Begun: time.Now()})
	p.Report(w, Outcome{Kind: OutcomeRefused, Begun: time.Now()})
	if load := p.Load(time.Now(), w); load.CachedTokens != 0 {
		t.Errorf("load of both ranks %+v", load)
	}
	if w.Health.Available(time.Now()) {
		t.Error("it is not marked down")
	}
	p.Report(w, Outcome{Kind: OutcomeAnswered, Begun: time.Now()}) // and asks it again at once
	if !w.Health.Available(time.Now()) || !w.Engine.Claim(time.Now()) {
		t.Error("it is still marked down, or not asked again")
	}
}

// TestUnansweredQuestionsMarkDown has a worker accept connections and answer no
// question. One may be lost; a worker that sends tokens may be busy. Its cache is
// not gone.
func TestUnansweredQuestionsMarkDown(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}))
	w := p.Worker("a:1")
	p.serve(w).End(true, nil)
	ask := func(err error) {
		status := http.StatusOK
		if err != nil {
			status = 0
		}
		p.RecordOwnRequest(t.Context(), w, status, err)
	}
	w.progress.lastOutput.Store(ticks(time.Now()))
	for range 3 {
		ask(io.EOF)
	}
	if !w.Health.Available(time.Now()) {
		t.Error("a busy worker is marked down")
	}
	w.progress.lastOutput.Store(0)
	for _, err := range []error{io.EOF, nil, io.ErrUnexpectedEOF} {
		ask(err)
		if !w.Health.Available(time.Now()) {
			t.Errorf("marked down after one question: %v", err)
		}
	}
	ask(context.DeadlineExceeded)
	if s := w.Health.State(time.Now()); w.Health.Available(time.Now()) || !s.Away {
		t.Errorf("not marked down after two questions: %+v", s)
	}
	p.Connected(w)
	if s := w.Health.State(time.Now()); w.Health.Available(time.Now()) || !s.Away {
		t.Errorf("a connection makes it well: %+v", s)
	}
	if n := p.cached(w); n != 1600 {
		t.Errorf("%d tokens are thought to be there, want 1600", n)
	}
	p.Report(w, Outcome{Kind: OutcomeAnswered, Begun: time.Now()})
	if s := w.Health.State(time.Now()); !w.Health.Available(time.Now()) || !s.Well || s.Away {
		t.Errorf("an answer does not make it well: %+v", s)
	}
}
