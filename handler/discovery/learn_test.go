package discovery

import (
	"cmp"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// keepsNone is the closer of a pool whose engines keep no sessions.
type keepsNone struct{ pool.Closer }

func (keepsNone) CloseAll() {}

func testPool(t *testing.T, s *pool.Settings) *pool.Pool {
	t.Helper()
	p, err := pool.New("test", s.WithDefaults(), func(*pool.Pool) pool.Closer { return keepsNone{} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Destruct(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// wanted returns settings with these workers as upstreams.
func wanted(workers ...worker.Settings) *pool.Settings {
	s := &pool.Settings{Workers: make(map[string]worker.Settings), Upstreams: make(map[string]bool)}
	for _, w := range workers {
		s.Workers[w.Dial], s.Upstreams[w.Dial] = w, true
	}
	return s
}

// tell reports a worker's engine.
func tell(p *pool.Pool, dial string, told engine.Info) *worker.Worker {
	w := p.Worker(dial)
	learn(p, w, told)
	agreeOnBlocks(p)
	return w
}

// TestBlockSizeIsThatOfTheEngines has engines report block sizes one after the other.
func TestBlockSizeIsThatOfTheEngines(t *testing.T) {
	all := wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1"}, worker.Settings{Dial: "c:1"})
	p := testPool(t, all)
	for i, step := range []struct {
		dial           string
		reports, want  int
		known, differs bool
	}{
		{"a:1", 0, 16, false, false},
		{"a:1", 32, 32, true, false},
		{"b:1", 0, 32, true, false},
		{"b:1", 64, 32, true, true},
		{"a:1", 64, 64, true, true},
		{"b:1", 1, 64, true, true},
		{"a:1", 1, 16, true, true}, // one token each is for no index
		{"a:1", 16, 16, true, true},
		{"b:1", 4096, 16, true, true}, // such blocks are for no index
	} {
		tell(p, step.dial, engine.Info{Type: engine.VLLM, BlockSize: step.reports, BootID: string(rune('a' + i))})
		s, incidents := p.Settings.Load(), p.Incidents.Open(time.Now())
		if s.BlockSize != step.want || p.KnowsBlockSize() != step.known || slices.ContainsFunc(incidents, func(in observe.Incident) bool { return in.What == incidentBlocks }) != step.differs {
			t.Errorf("step %d: block size %d, known %t, incidents %+v; want %+v", i, s.BlockSize, p.KnowsBlockSize(), incidents, step)
		}
	}
	if !strings.Contains(Contradictions(p, p.Worker("b:1"))["block_size"], "too large") {
		t.Error("no contradiction says that the blocks are too large")
	}
	if Apply(p, all.WithDefaults()) {
		t.Error("the same settings are said to differ")
	}
	all.BlockSize = 48
	Apply(p, all.WithDefaults())
	if tell(p, "c:1", engine.Info{Type: engine.VLLM, BlockSize: 128}); p.Settings.Load().BlockSize != 48 {
		t.Errorf("the configured block size became %d", p.Settings.Load().BlockSize)
	}
}

// TestToldRanksAreTargets reports an engine's ranks and capacity. Then the operator overrides
// them, and the engine restarts with fewer.
func TestToldRanksAreTargets(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", ID: 10}))
	capacities := func(w *worker.Worker) (list []int64) {
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
	w := tell(p, "a:1", engine.Info{Type: engine.VLLM, DPSize: 3, KVTokens: 5000, BootID: "1"})
	want("told", 5000, 5000, 5000)
	tell(p, "a:1", engine.Info{})
	want("told nothing", 5000, 5000, 5000)
	Apply(p, wanted(worker.Settings{Dial: "a:1", ID: 10, DPSize: 2, KVTokens: 7000}).WithDefaults())
	want("configured", 7000, 7000)
	Apply(p, wanted(worker.Settings{Dial: "a:1", ID: 10, KVTokens: 7000}).WithDefaults())
	want("configured in part", 7000, 7000, 7000)
	tell(p, "a:1", engine.Info{Type: engine.VLLM, DPSize: 1, BootID: "2"})
	want("restarted with one", 7000)
	Apply(p, wanted(worker.Settings{Dial: "a:1", ID: 10, DPSize: 2, Engine: engine.TRTLLM}).WithDefaults())
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
		s    *pool.Settings
		set  worker.Settings
		told engine.Info
		want []string
	}{
		{s, worker.Settings{Engine: worker.EngineAuto}, engine.Info{Type: engine.VLLM, KVTokens: 5, DPSize: 2, BlockSize: 7}, nil},
		{s, worker.Settings{Engine: engine.VLLM, KVTokens: 5, DPSize: 2}, engine.Info{}, nil},
		{s, worker.Settings{Engine: engine.VLLM, KVTokens: 5, DPSize: 2}, engine.Info{Type: engine.SGLang, KVTokens: 6, DPSize: 4}, []string{"dp_size", "engine", "kv_tokens"}},
		{s, worker.Settings{Engine: worker.EngineAuto, KVTokens: 400000}, engine.Info{KVTokens: 399984}, nil},
		{s, worker.Settings{Engine: worker.EngineAuto, KVTokens: 400000}, engine.Info{KVTokens: 370000}, []string{"kv_tokens"}},
		{s, worker.Settings{Engine: worker.EngineAuto}, engine.Info{BlockSize: 1056}, []string{"block_size"}},
		{s, worker.Settings{Engine: worker.EngineAuto, DPSize: 2}, engine.Info{Type: engine.VLLM, Version: "0.8.5"}, []string{"dp_size"}},
		{s, worker.Settings{Engine: engine.Other}, engine.Info{Type: engine.SGLang}, nil},
		{s, worker.Settings{Engine: worker.EngineAuto, DPSize: 2}, engine.Info{Type: engine.LlamaCpp}, []string{"dp_size"}},
		{own.WithDefaults(), worker.Settings{Engine: worker.EngineAuto}, engine.Info{Type: engine.VLLM, BlockSize: 32}, []string{"block_size"}},
		{own.WithDefaults(), worker.Settings{Engine: worker.EngineAuto}, engine.Info{Type: engine.SGLang, BlockSize: 1}, nil},
	} {
		c.s.Workers = map[string]worker.Settings{"a:1": c.set}
		p := testPool(t, c.s)
		p.SetInfo(p.Worker("a:1"), c.told)
		var got []string
		for what := range Contradictions(p, p.Worker("a:1")) {
			got = append(got, what)
		}
		if slices.Sort(got); !slices.Equal(got, c.want) {
			t.Errorf("%+v, told %+v: %v, want %v", c.set, c.told, got, c.want)
		}
	}
}

// TestRestartsAreSeenAfterAGap has an engine omit its start in one answer.
func TestRestartsAreSeenAfterAGap(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
	for i, life := range []string{"a", "", "b"} {
		w := tell(p, "a:1", engine.Info{Type: engine.VLLM, BootID: life})
		if w.Engine().Info.BootID != cmp.Or(life, "a") {
			t.Errorf("answer %d: the start is %q", i, w.Engine().Info.BootID)
		}
	}
}

// TestUnsureAnswerChangesNothing has an engine fall silent while it is asked.
func TestUnsureAnswerChangesNothing(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1"}))
	unsure := engine.Info{Type: engine.Other, Unsure: true}
	if w := tell(p, "a:1", unsure); w.Engine().Info != (engine.Info{Type: engine.Other}) {
		t.Errorf("it is taken for %+v", w.Engine().Info)
	}
	tell(p, "b:1", engine.Info{Type: engine.SGLang})
	if w := tell(p, "b:1", unsure); w.Engine().Info.Type != engine.SGLang {
		t.Errorf("an SGLang is now taken for %+v", w.Engine().Info)
	}
}

// TestWorkersAreLeftAlone checks the time between probes: in an idle pool, and of a worker
// that needs a key.
func TestWorkersAreLeftAlone(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
	w := p.Worker("a:1")
	want := func(what string, d time.Duration) {
		t.Helper()
		if got := modelsInterval(p, w, time.Now()); got != d {
			t.Errorf("%s: for %v, want %v", what, got, d)
		}
	}
	p.See(pool.Offers{Table: new(pool.Table)}, time.Now(), false)
	want("in use", 0)
	w.AnsweredListing(http.StatusForbidden)
	want("refused", worker.AskedLess)
	w.AnsweredListing(http.StatusOK)
	p.See(pool.Offers{Table: new(pool.Table)}, time.Now().Add(-time.Hour), false)
	want("idle", worker.AskedLess)
	p.Serve(time.Now())
	want("just begun", 0)
}

// TestSleepingEngineDrains has an engine fall asleep, and wake up without its cache.
func TestSleepingEngineDrains(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
	info := engine.Info{Type: engine.VLLM, BootID: "1", BlockSize: 16}
	w := tell(p, "a:1", info)
	var sel kvscore.Selection
	r := &kvscore.Request{Prompt: cache.Prompt{Blocks: []uint64{1, 2, 3}, BlockTokens: 16, Tokens: 48}}
	_, l := p.Scheduler.Select(time.Now(), r, p.Scheduler.Refs(w.Target(0)), 0, nil, &sel)
	l.End(true, nil)
	if w.Draining() || p.Load(time.Now(), w).CachedTokens == 0 {
		t.Fatal("it drains, or holds nothing")
	}
	info.Asleep = true
	tell(p, "a:1", info)
	if !w.Draining() || !w.Asleep() || p.Load(time.Now(), w).CachedTokens > 0 {
		t.Error("an engine that sleeps does not drain, or has a cache")
	}
	p.Drain(w, true)
	info.Asleep = false
	tell(p, "a:1", info)
	if w.Asleep() || !w.Draining() {
		t.Error("it is asleep, or the operator's drain is over")
	}
	if p.Drain(w, false); w.Draining() {
		t.Error("it drains")
	}
}

// warned returns the warnings of a worker's engine that are logged, and the advice of the last one.
func warned(p *pool.Pool, dial string) (list []string, advice string) {
	w, now := p.Worker(dial), time.Now()
	review(p, w, now)
	logged := w.Warned.Open(now)
	for _, v := range Warnings(w, now) {
		if !slices.ContainsFunc(logged, func(in observe.Incident) bool { return in.What == v.What }) {
			v.What += " is not logged"
		}
		list, advice = append(list, v.What), v.Advice
	}
	if len(logged) != len(list) {
		list = append(list, "others are logged")
	}
	return list, advice
}

func TestEngineWarningsFollowTheEngine(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", MaxRunning: worker.LimitAuto}, worker.Settings{Dial: "b:1", Engine: engine.Other, MaxRunning: worker.LimitAuto}))
	want := func(dial, advice string, list ...string) {
		t.Helper()
		if got, a := warned(p, dial); !slices.Equal(got, list) || !strings.Contains(a, advice) {
			t.Errorf("%s: warnings %q with the advice %q, want %q with %q", dial, got, a, list, advice)
		}
	}
	want("a:1", "")
	tell(p, "a:1", engine.Info{Type: engine.VLLM, NoPrefixCache: true})
	want("a:1", "--max-num-seqs", warnPrefixCache, warnNoLimit)
	tell(p, "a:1", engine.Info{Type: engine.SGLang, NoPrefixCache: true, MaxRunning: 3})
	want("a:1", "--disable-radix-cache", warnPrefixCache)
	tell(p, "a:1", engine.Info{Type: engine.SGLang, BlockSize: 64, MaxRunning: 3})
	want("a:1", "")
	Apply(p, p.Settings.Load()) // engines of the type other are never asked
	want("b:1", "max_running", warnNoLimit)
	Apply(p, wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1", Engine: engine.Other}).WithDefaults())
	want("b:1", "")
}

// TestMissingCountsAreWarnedOf has answers with and without a count of cached tokens.
// Engines may omit a count of 0.
func TestMissingCountsAreWarnedOf(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
	w := tell(p, "a:1", engine.Info{Type: engine.VLLM, BlockSize: 32})
	answers := func(n int, of worker.Prediction, counted bool) {
		for range n {
			w.CountedCache(&of, counted, p.Settings.Load().BlockSize)
		}
	}
	want := func(what string, list ...string) {
		t.Helper()
		if got, _ := warned(p, "a:1"); !slices.Equal(got, list) {
			t.Errorf("%s: warnings %q, want %q", what, got, list)
		}
	}
	answers(100, worker.Prediction{}, false)
	answers(100, worker.Prediction{Tokens: 63}, false)
	answers(100, worker.Prediction{Tokens: 96, Shared: 2}, false) // still being computed
	want("prompts that may not be cached")
	answers(19, worker.Prediction{Tokens: 64}, false)
	answers(1, worker.Prediction{}, true)
	answers(19, worker.Prediction{Tokens: 64}, false)
	want("a count among them")
	answers(1, worker.Prediction{Tokens: 64}, false)
	want("20 answers", warnCachedTokens)
	if _, advice := warned(p, "a:1"); !strings.Contains(advice, "--enable-prompt-tokens-details") {
		t.Errorf("the advice is %q", advice)
	}
	answers(100, worker.Prediction{Tokens: 640}, false)
	want("many answers", warnCachedTokens)
	answers(1, worker.Prediction{Tokens: 64}, true)
	want("a count")
}

func TestPublishersOfAWorker(t *testing.T) {
	two := engine.KVEvents{Endpoint: "tcp://*:5557", Replay: "tcp://*:6557", Topic: "t", Publishers: 2}
	one := two
	one.Publishers = 1
	path, dials := one, one
	listens := engine.KVEvents{Endpoint: "tcp://127.0.0.1:5557", Publishers: 1, Listens: true}
	path.Endpoint, dials.Endpoint = "ipc:///run/x", "tcp://127.0.0.1:5557"
	bound := engine.KVEvents{Endpoint: "tcp://0.0.0.0:39121", Publishers: 1}
	at := func(endpoint, replay, topic string) worker.Publisher {
		return worker.Publisher{Endpoint: endpoint, Replay: replay, Topic: topic}
	}
	for _, c := range []struct {
		name  string
		dial  string
		set   *worker.KVEventsSettings
		of    engine.KVEvents
		ranks int
		want  []worker.Publisher
		why   error
	}{
		{"nothing", "10.0.0.1:8000", nil, engine.KVEvents{}, 1, nil, nil},
		{"reported", "10.0.0.1:8000", nil, one, 1, []worker.Publisher{at("tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557", "t")}, nil},
		{"reported by ranks", "[fd00::1]:8000", nil, two, 2, []worker.Publisher{
			at("tcp://[fd00::1]:5557", "tcp://[fd00::1]:6557", "t"), at("tcp://[fd00::1]:5558", "tcp://[fd00::1]:6558", "t"),
		}, nil},
		{"reported as bound", "gpu:8000", nil, bound, 1, []worker.Publisher{at("tcp://gpu:39121", "", "")}, nil},
		{"of ranks that the engine chooses", "gpu:8000", nil, two, 1, nil, errRanks},
		{"of an engine that connects", "gpu:8000", nil, dials, 1, nil, errDials},
		{"of an engine that listens at one address", "gpu:8000", nil, listens, 1, []worker.Publisher{at("tcp://gpu:5557", "", "")}, nil},
		{"at a path here", "127.0.0.1:8000", nil, path, 1, []worker.Publisher{at("ipc:///run/x", "tcp://127.0.0.1:6557", "t")}, nil},
		{"at a path elsewhere", "gpu:8000", nil, path, 1, nil, errUnread},
		{"off", "gpu:8000", &worker.KVEventsSettings{Source: "off"}, one, 1, nil, nil},
		{"with a topic and another replay", "gpu:8000", &worker.KVEventsSettings{Topic: "a", Replay: "7000"}, one, 1, []worker.Publisher{at("tcp://gpu:5557", "tcp://gpu:7000", "a")}, nil},
		{"port", "tcp/gpu:8000", &worker.KVEventsSettings{Source: "5557", Replay: "5600"}, engine.KVEvents{}, 2, []worker.Publisher{
			at("tcp://gpu:5557", "tcp://gpu:5600", ""), at("tcp://gpu:5558", "tcp://gpu:5601", ""),
		}, nil},
		{"endpoint", "unix//run/x", &worker.KVEventsSettings{Source: "tcp://127.0.0.1:9"}, one, 1, []worker.Publisher{at("tcp://127.0.0.1:9", "", "")}, nil},
		{"path of ranks", "127.0.0.1:8000", &worker.KVEventsSettings{Source: "ipc:///run/x"}, one, 2, nil, errUnread},
	} {
		got, why := publishers(c.set, hostOf(c.dial), c.of, c.ranks)
		if !slices.Equal(got, c.want) || !errors.Is(why, c.why) {
			t.Errorf("%s: %v, %v; want %v, %v", c.name, got, why, c.want, c.why)
		}
	}
}
