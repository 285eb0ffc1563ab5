package tests

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
	"github.com/tidwall/gjson"
)

// followed is what the admin API shows of a worker's KV events.
type followed struct {
	Dial   string           `json:"dial"`
	Events []followedStream `json:"kv_events"`
	Engine struct {
		Warnings []struct {
			What   string `json:"what"`
			Advice string `json:"advice"`
		} `json:"warnings"`
	} `json:"engine"`
}

// followedStream is one entry of kv_events.
type followedStream struct {
	State      string           `json:"state"`
	Knowledge  string           `json:"knowledge"`
	Complete   bool             `json:"complete"`
	Sequence   uint64           `json:"sequence"`
	Error      *string          `json:"error"`
	Gaps       uint64           `json:"gaps"`
	Replays    uint64           `json:"replays"`
	Restarts   uint64           `json:"restarts"`
	BlockSize  *int             `json:"block_size_tokens"`
	Stored     uint64           `json:"stored_blocks"`
	Removed    uint64           `json:"removed_blocks"`
	Held       map[string]int64 `json:"cached_blocks"`
	Skipped    map[string]int64 `json:"skipped_events"`
	Reconnects uint64           `json:"reconnects"`
	Cleared    uint64           `json:"cleared"`
}

func (s *server) followed(t testing.TB, e *engine.Engine) followed {
	t.Helper()
	var list []followed
	s.api(t, "GET", defaultPool+"/workers", nil, &list)
	for _, w := range list {
		if w.Dial == e.Addr() {
			return w
		}
	}
	t.Fatalf("no worker %s", e.Addr())
	return followed{}
}

// awaitKnowledge waits until the events of all ranks of an engine are as wanted.
func (s *server) awaitKnowledge(t testing.TB, e *engine.Engine, state, knowledge string) {
	t.Helper()
	right(t, func() string {
		w := s.followed(t, e)
		good := len(w.Events) > 0
		for _, f := range w.Events {
			good = good && f.State == state && f.Knowledge == knowledge
		}
		if good {
			return ""
		}
		return fmt.Sprintf("engine %s: %+v, want %s and %s", e.Name(), w, state, knowledge)
	})
}

// askIDs posts a prompt of token ids, and returns the tokens that the router predicted to be
// cached and those that the engine reports.
func (s *server) askIDs(t testing.TB, ids []uint32, more string, header ...string) (engine string, predicted, reported int) {
	t.Helper()
	text := make([]string, len(ids))
	for i, id := range ids {
		text[i] = strconv.FormatUint(uint64(id), 10)
	}
	a := s.post(t.Context(), "/v1/completions", []byte(`{"model":"sim-8b","max_tokens":4`+more+`,"prompt":[`+strings.Join(text, ",")+`]}`), header...)
	if !a.ok() {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	predicted, err := strconv.Atoi(a.header.Get("X-KV-Predicted-Cached-Tokens"))
	if err != nil {
		t.Fatalf("headers %v", a.header)
	}
	return a.engine(), predicted, int(gjson.GetBytes(a.body, "usage.prompt_tokens_details.cached_tokens").Int())
}

// ids returns n token ids that no other seed has.
func idsOf(seed, n int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(seed*100_000 + i)
	}
	return list
}

// eventFlavours are engines that publish, and how the router finds it out.
var eventFlavours = map[string]struct {
	cfg    engine.Config
	option func(*engine.Engine) string
}{
	"vLLM": {cfg: engine.Config{Flavour: engine.VLLM, Events: &engine.EventConfig{}}},
	"vLLM with arrays and bytes": {cfg: engine.Config{Flavour: engine.VLLM, Events: &engine.EventConfig{
		Form: publisher.Form{Arrays: true, Hashes: publisher.Bytes}, OldReplay: true, Topic: "kv@x@y", HashSeed: 5,
	}}},
	"SGLang":                         {cfg: engine.Config{Flavour: engine.SGLang, Events: &engine.EventConfig{}}, option: replayOf},
	"SGLang with pages of one token": {cfg: engine.Config{Flavour: engine.SGLang, BlockSize: 1, Blocks: 60_000, Events: &engine.EventConfig{}}, option: replayOf},
	"vLLM of two ranks":              {cfg: engine.Config{Flavour: engine.VLLM, Ranks: 2, Events: &engine.EventConfig{}}},
	"TensorRT-LLM":                   {cfg: engine.Config{Flavour: engine.TRTLLM, BlockSize: 32, Events: &engine.EventConfig{}}, option: endpointsOf},
}

// replayOf names the replay endpoint of an engine that does not report it.
func replayOf(e *engine.Engine) string {
	_, replay := e.EventEndpoints(0)
	return fmt.Sprintf("worker %s {\nkv_events auto {\nreplay %s\n}\n}", e.Addr(), replay)
}

func endpointsOf(e *engine.Engine) string {
	pub, replay := e.EventEndpoints(0)
	return fmt.Sprintf("worker %s {\nkv_events %s {\nreplay %s\n}\n}", e.Addr(), pub, replay)
}

// TestEventsOfEngines has conversations of token ids before two engines of each flavour. The
// router finds their events, and predicts what they report.
func TestEventsOfEngines(t *testing.T) {
	for name, f := range eventFlavours {
		t.Run(name, func(t *testing.T) {
			engines, block := publishing(t, 2, f.cfg), []string{"response_headers X-KV-", "policy dynamo"}
			for _, e := range engines {
				if f.option != nil {
					block = append(block, f.option(e))
				}
			}
			s := startCaddy(t, route(engines, block...))
			for _, e := range engines {
				s.awaitType(t, e.Addr(), string(f.cfg.Flavour))
				s.awaitKnowledge(t, e, "live", "exact")
				s.teachBlockSize(t, e)
				for _, p := range e.Publishers() {
					p.Delay(3 * time.Millisecond) // events come about when the next request does
				}
			}
			size := max(16, f.cfg.BlockSize)
			for chat := range 4 {
				prompt := idsOf(chat+1, 41*size)
				home, predicted, reported := s.askIDs(t, prompt[:10*size+3], "")
				if predicted != 0 || reported != 0 {
					t.Fatalf("a new prompt: %d tokens predicted, %d reported", predicted, reported)
				}
				for turn := 2; turn <= 4; turn++ {
					at, predicted, reported := s.askIDs(t, prompt[:turn*10*size+3], "")
					if at != home || predicted > reported || reported-predicted >= 16 || predicted < (turn-1)*10*size {
						t.Errorf("turn %d: %d tokens predicted, %d reported by %s; the last turn was at %s", turn, predicted, reported, at, home)
					}
				}
			}
		})
	}
}

// teachBlockSize has the engine publish an event, unless it reports its block size. Until then, the
// router cannot tell which prompts the events will name.
func (s *server) teachBlockSize(t testing.TB, e *engine.Engine) {
	t.Helper()
	known := func() bool { return s.followed(t, e).Events[0].BlockSize != nil }
	if known() {
		return
	}
	body := `{"model":"sim-8b","max_tokens":1,"prompt":` + idsFrom(900_000, 40) + `}`
	direct(e).post(t.Context(), atCompletions, []byte(body))
	eventually(t, "the router knows the block size", known)
}

// publishing starts simulated engines that publish.
func publishing(t testing.TB, n int, cfg engine.Config) []*engine.Engine {
	t.Helper()
	cfg.Events = cmp.Or(cfg.Events, new(engine.EventConfig))
	return startFleet(t, n, cfg)
}

// TestNamesStayWithTheirAttempt has an engine refuse requests that the router has named for its events. The name does
// not go on to the next engine, and no client's name is changed.
func TestNamesStayWithTheirAttempt(t *testing.T) {
	named := publishing(t, 1, engine.Config{Model: "canned", Words: true})[0]
	other := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, fmt.Sprintf("kv_router %s %s {\nworker %s {\nmodels canned\n}\n}", named.Addr(), other.Addr(), other.Addr()))
	s.awaitKnowledge(t, named, "live", "exact")
	s.teachBlockSize(t, named)
	s.drain(t, named, "drain") // the other one is busy, so that the named one is the first choice
	other.SetPace(canned.Pace{FirstToken: time.Hour})
	q := s.startChat(t, "hello")
	defer q.leave()
	eventually(t, "the other engine to be busy", func() bool { return other.Active() == 1 })
	other.SetPace(canned.Pace{})
	s.drain(t, named, "undrain")
	setFault(t, named, engine.Fault{Kind: engine.Status})
	sent := 0
	eventually(t, "a named request is sent again", func() bool {
		sent++
		s.mustChat(t, ask(strings.Repeat(fmt.Sprint("a prompt that fills some blocks ", sent), 20)))
		for _, r := range named.Journal() {
			if strings.HasPrefix(r.Header.Get("X-Session-Id"), "kvr-") && r.Status == http.StatusServiceUnavailable {
				return true
			}
		}
		return false
	})
	s.mustChat(t, ask("hello"), "X-Session-Id", "mine")
	got := other.Journal()
	for i, r := range got {
		if want := map[bool]string{true: "mine"}[i == len(got)-1]; r.Header.Get("X-Session-Id") != want {
			t.Errorf("request %d has the session %q, want %q", i, r.Header.Get("X-Session-Id"), want)
		}
	}
}

// TestTurnsOfOtherRouters has a conversation go on at a router that has sent none of its turns, and shares no
// server with the first one. The events tell it where the conversation is cached.
func TestTurnsOfOtherRouters(t *testing.T) {
	engines := publishing(t, 3, engine.Config{})
	other := strings.Replace(route(engines, "pool b", "policy warmest"), "kv_router", "@b header X-Router b\nkv_router @b", 1)
	s := startCaddy(t, other+"\n"+route(engines))
	rng := rand.New(rand.NewPCG(3, 3)) //nolint:gosec // a test
	for _, e := range engines {
		s.awaitKnowledge(t, e, "live", "exact")
		s.teachBlockSize(t, e)
	}
	s.mustChat(t, simChat(prose(rng, 8000, 9000)), "X-Router", "b") // how long are tokens
	for range 3 {
		c := simChat(prose(rng, 8000, 9000))
		first := s.mustChat(t, c)
		c.Messages = append(c.Messages, message{"assistant", first.text}, message{"user", "and then?"})
		eventually(t, "the other router knows where the conversation is", func() bool {
			var x adminExplained
			s.api(t, http.MethodPost, "/pools/b/explain?path=/v1/chat/completions", c.body(), &x)
			for _, one := range x.Candidates {
				if one.Tokens > 1000 && one.Source == "learned" {
					return true
				}
			}
			return false
		})
		second := s.mustChat(t, c, "X-Router", "b")
		if cached, prompt := second.cached(); second.engine() != first.engine() || cached < prompt/2 {
			t.Errorf("of %d tokens %d were cached, by %s; the first turn was at %s", prompt, cached, second.engine(), first.engine())
		}
	}
}

// TestEventsWithoutReplay begins in the middle of engines' lives. The router then knows what they
// held before by its own requests only.
func TestEventsWithoutReplay(t *testing.T) {
	engines := publishing(t, 2, engine.Config{Blocks: 400, Events: &engine.EventConfig{NoReplay: true}})
	prompt := idsOf(1, 640)
	body := `{"model":"sim-8b","max_tokens":1,"prompt":` + idsFrom(100_000, 323) + `}`
	direct(engines[1]).post(t.Context(), atCompletions, []byte(body))
	s := startCaddy(t, route(engines, "response_headers X-KV-", "policy dynamo", "trust pins", "worker "+engines[1].Addr()+" {\nid 2\n}"))
	for _, e := range engines {
		s.awaitKnowledge(t, e, "untrusted", "partial")
	}
	if _, predicted, reported := s.askIDs(t, prompt[:330], `,"nvext":{"backend_instance_id":2}`); predicted != 0 || reported != 320 {
		t.Errorf("%d tokens predicted and %d reported, want 0 and 320", predicted, reported)
	}
	if at, predicted, reported := s.askIDs(t, prompt, ""); at != "e2" || predicted != 320 || reported != 320 {
		t.Errorf("%d tokens predicted and %d reported at %s", predicted, reported, at)
	}
	for _, e := range engines {
		direct(e).post(t.Context(), engine.ResetPath, nil)
		direct(e).post(t.Context(), atCompletions, []byte(`{"model":"sim-8b","prompt":[1,2,3],"max_tokens":1}`)) // vLLM says so with its next step
		s.awaitKnowledge(t, e, "live", "exact")
	}
}

// TestEventsOverAReload follows the same streams before and after. With kv_events off, the
// router follows none.
func TestEventsOverAReload(t *testing.T) {
	engines := publishing(t, 2, engine.Config{})
	s := startCaddy(t, route(engines, "response_headers X-KV-"))
	for _, e := range engines {
		s.awaitKnowledge(t, e, "live", "exact")
	}
	prompt := idsOf(1, 640)
	home, _, _ := s.askIDs(t, prompt[:323], "")
	before := s.followed(t, engines[0]).Events[0].Replays
	s.mustReload(t, route(engines, "response_headers X-KV-", "policy dynamo"))
	if at, predicted, reported := s.askIDs(t, prompt, ""); at != home || predicted != 320 || reported != 320 {
		t.Errorf("%d tokens predicted and %d reported", predicted, reported)
	}
	if f := s.followed(t, engines[0]).Events[0]; f.Replays != before || f.Knowledge != "exact" {
		t.Errorf("after the reload: %+v", f)
	}
	s.mustReload(t, route(engines, "response_headers X-KV-", "worker * {\nkv_events off\n}"))
	eventually(t, "no events are followed", func() bool {
		return len(s.followed(t, engines[0]).Events)+len(s.followed(t, engines[1]).Events) == 0
	})
	if _, predicted, _ := s.askIDs(t, prompt, ""); predicted != 624 {
		t.Errorf("%d tokens predicted by the approximate model", predicted)
	}
}
