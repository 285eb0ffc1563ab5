package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestConversationsStayOnTheirRank holds short and long conversations with one engine of
// two data-parallel ranks. Clients without the grant ask for a rank. The rank that the
// router names computes each turn, and the router names it in the engine's own way.
func TestConversationsStayOnTheirRank(t *testing.T) {
	for _, v := range []struct {
		flavour engine.Flavour
		from    string
	}{{engine.VLLM, "header"}, {engine.SGLang, "header"}, {engine.OldSGLang, "body"}} {
		t.Run(string(v.flavour), func(t *testing.T) {
			e := startSimulated(t, engine.Config{Flavour: v.flavour, Ranks: 2})
			s := startCaddy(t, route([]*engine.Engine{e}, "response_headers X-KV-", affinity("hard"), "policy warmest"))
			s.mustChat(t, simChat("hello"))
			s.awaitRanks(t, e.Addr(), 2)
			used, moved := map[string]int{}, 0
			for i := 0; i < 12 || i < 60 && min(used["0"], used["1"]) == 0; i++ { // a draw decides where they begin
				rng := rand.New(rand.NewPCG(5, uint64(i))) //nolint:gosec // a test
				size, home := 300, ""
				if i%4 < 2 {
					size = 8000 // more than goes out in one write
				}
				c := chat{Model: "sim-8b", Stream: i%3 == 0}
				for range 3 {
					c.Messages = append(c.Messages, message{"user", prose(rng, size, 2*size)})
					header := []string{"X-Data-Parallel-Rank", "1"}
					if i%2 == 0 {
						header = append(header, "X-Session-Id", fmt.Sprint("session ", i))
					}
					a := s.mustChat(t, c, header...)
					c.Messages = append(c.Messages, message{"assistant", a.text})
					rank := a.header.Get("X-KV-Dp-Rank")
					if r := lastPost(e); strconv.Itoa(r.Rank) != rank || r.RankFrom != v.from {
						t.Fatalf("said to be rank %s, the engine has %+v", rank, r)
					}
					used[rank]++
					if home != "" && rank != home {
						moved++
					}
					home = rank
				}
			}
			if moved > 0 || min(used["0"], used["1"]) == 0 {
				t.Errorf("%d later turns left their rank; requests by rank %v", moved, used)
			}
			w := s.worker(t, e.Addr())
			if w.Ranks[0].Cache.Cached == 0 || w.Ranks[1].Cache.Cached == 0 || w.Cache.Cached != w.Ranks[0].Cache.Cached+w.Ranks[1].Cache.Cached {
				t.Errorf("the cache models are %+v of %+v", w.Ranks, w.Cache)
			}
			for rank := range 2 {
				if _, found := s.scrape(t).sum("caddy_kv_router_worker_cached_tokens", fmt.Sprintf(`dp_rank="%d"`, rank)); !found {
					t.Errorf("no metrics of rank %d", rank)
				}
			}
			s.booksAtZero(t)
		})
	}
}

// TestRanksThatTheEngineChooses repeats prompts in vLLM's responses API, which ignores the rank. The
// ranks take turns, but that is no sign of a lost cache, and tells nothing of a target.
func TestRanksThatTheEngineChooses(t *testing.T) {
	e := startSimulated(t, engine.Config{Ranks: 2})
	s := startCaddy(t, route([]*engine.Engine{e}, "policy dynamo"))
	s.mustChat(t, simChat("hello"))
	s.awaitRanks(t, e.Addr(), 2)
	prompt := func(i int) string { return strings.Repeat(fmt.Sprintf("number %d of the prompts ", i), 100) }
	for i := range 24 { // afterwards the router knows that its predictions are right
		s.mustChat(t, simChat(prompt(i/2)))
	}
	s.booksAtZero(t)
	before := s.scrape(t)
	for i := range 24 {
		a := s.post(t.Context(), "/v1/responses", []byte(`{"model":"sim-8b","max_output_tokens":2,"input":"`+prompt(12+i/2)+`"}`))
		if !a.ok() {
			t.Fatalf("status %d: %.300s", a.status, a.body)
		}
	}
	s.booksAtZero(t)
	after := s.scrape(t)
	for name, label := range map[string]string{"caddy_kv_router_worker_tokens_total": `tokens="predicted"`, "caddy_kv_router_prediction_error_tokens_count": "pool="} {
		if was, is := before.value(name, label), after.value(name, label); was == 0 || is != was {
			t.Errorf("%s was %v, and is %v", name, was, is)
		}
	}
	w := s.worker(t, e.Addr())
	for _, r := range w.Ranks {
		equal(t, r.Cache.Capacity, w.Engine.Told.KVTokens, "rank %d: learned capacity in tokens", r.Rank)
	}
	ranks := make(map[int]bool)
	for _, r := range e.Journal() {
		if r.Path == "/v1/responses" {
			ranks[r.Rank] = r.RankFrom == "" && r.Header.Get("X-Data-Parallel-Rank") == ""
		}
	}
	if len(ranks) != 2 || !ranks[0] || !ranks[1] {
		t.Errorf("the engine chose ranks %v", ranks)
	}
	equal(t, s.logged(t, "worker lost its KV cache"), 0, "resets of the cache model")
}

// TestRanksOfOneWorkerAreTriedOnce has one worker with four ranks that refuses everything,
// and one that does not. After a failed attempt the router leaves out the worker, not only
// the rank. Requests without a readable prompt get a rank, too.
func TestRanksOfOneWorkerAreTriedOnce(t *testing.T) {
	four, one := startSimulated(t, engine.Config{Name: "four", Flavour: engine.SGLang, Ranks: 4}), startSimulated(t, engine.Config{Name: "one"})
	s := startCaddy(t, route([]*engine.Engine{four, one}, "response_headers X-KV-", "policy least_load"))
	s.mustChat(t, simChat("hello"))
	s.awaitRanks(t, four.Addr(), 4)
	var x struct {
		Candidates []struct {
			Rank int `json:"dp_rank"`
		} `json:"candidates"`
	}
	s.api(t, "POST", defaultPool+"/explain?path=/v1/chat/completions", simChat("who?").body(), &x)
	if len(x.Candidates) != 5 {
		t.Errorf("candidates %+v, want five", x.Candidates)
	}
	setFault(t, four, engine.Fault{Kind: engine.Status, Status: 503})
	before := four.Journal()
	for i := range 5 {
		if a := s.mustChat(t, simChat(fmt.Sprint("question ", i))); a.header.Get(engine.EngineHeader) != "one" || a.header.Get("X-KV-Dp-Rank") != "0" {
			t.Errorf("answered by %s, rank %s", a.header.Get(engine.EngineHeader), a.header.Get("X-KV-Dp-Rank"))
		}
	}
	refused := 0
	for _, r := range four.Journal()[len(before):] {
		if r.Path == "/v1/chat/completions" {
			refused++
		}
	}
	if refused > 5 {
		t.Errorf("the worker that refuses was tried %d times in 5 requests", refused)
	}
	for _, r := range one.Journal() {
		if r.Header.Get("X-Data-Parallel-Rank") != "" || r.RankFrom != "" {
			t.Errorf("a worker with one rank was told which: %+v", r)
		}
	}
	setFault(t, four, engine.Fault{})
	one.Kill()
	body, _ := json.Marshal(simChat("compressed, as the header has it"))
	eventually(t, "a body that is not read to be told its rank", func() bool {
		s.post(t.Context(), "/v1/chat/completions", body, "Content-Encoding", "x-none")
		for _, r := range four.Journal() {
			if r.Header.Get("Content-Encoding") == "x-none" && r.RankFrom == "header" {
				return true
			}
		}
		return false
	})
}

// countlessSGLang answers with what cached returns of a request's body: what is
// added to the usage.
func countlessSGLang(t *testing.T, cached func(body string) string) (*fake, *server) {
	t.Helper()
	tells := fakeSGLang(`"version":"0.5.19","page_size":1,"dp_size":1`)
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return tells(w, r)
		}
		b, _ := io.ReadAll(r.Body)
		body := string(b)
		if !strings.Contains(body, `"stream":true`) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, fakeChat(cached(body)))
			return true
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: %s\n\ndata: %s\n\ndata: [DONE]\n\n",
			`{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"hi"}}]}`,
			`{"id":"x","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":2000,"completion_tokens":1`+cached(body)+`}}`)
		return true
	})
	s := startCaddy(t, "kv_router "+f.Addr()+" {\ninject_usage\n}")
	s.mustChat(t, simChat("hello"))
	s.awaitType(t, f.Addr(), "sglang")
	return f, s
}

const withCached = `,"prompt_tokens_details":{"cached_tokens":%d}`

// TestResetOfTheCacheIsNoticed has engines lose their caches twice, as with weight updates of reinforcement
// learning, while 24 conversations go on. The router notices each loss, and learns no capacity from it.
func TestResetOfTheCacheIsNoticed(t *testing.T) {
	for name, v := range map[string]struct {
		cfg    engine.Config
		reset  string
		events bool
	}{
		"vLLM":              {engine.Config{Flavour: engine.VLLM}, engine.ResetPath, false},
		"vLLM with events":  {engine.Config{Flavour: engine.VLLM, Events: &engine.EventConfig{}}, engine.ResetPath, true},
		"SGLang":            {engine.Config{Flavour: engine.SGLang}, engine.FlushPath, false},
		"vLLM of two ranks": {engine.Config{Flavour: engine.VLLM, Ranks: 2}, engine.ResetPath, false},
	} {
		t.Run(name, func(t *testing.T) {
			const tokens = 131072
			v.cfg.Blocks, v.cfg.MaxModelLen = tokens/16, 8192
			engines := []*engine.Engine{startSimulated(t, v.cfg), startSimulated(t, v.cfg)}
			s := startCaddy(t, route(engines, "response_headers X-KV-"))
			for _, e := range engines {
				s.awaitType(t, e.Addr(), string(v.cfg.Flavour))
			}
			before := s.scrape(t)
			cleared := func() float64 { return s.scrape(t).value(mirrorCleared) - before.value(mirrorCleared) }
			talks := make([]chat, 24)
			for i := range talks {
				talks[i] = chatOf(uint64(i), 800)
			}
			var homes []string
			hidden := 0 // losses that only the turn after may show
			for turn := range 8 {
				lost, wrong, moved := cleared(), 0, 0
				if turn == 2 || turn == 5 {
					for _, e := range engines {
						if a := direct(e).post(t.Context(), v.reset, nil); a.status != http.StatusOK {
							t.Fatal(a.status, a.err)
						}
						if v.events { // which come with the engine's next step
							direct(e).mustChat(t, simChat("hi"))
						}
					}
				}
				if v.events {
					for _, e := range engines {
						s.settle(t, e)
					}
				}
				for i := range talks {
					a := s.mustChat(t, talks[i], "X-Session-Id", fmt.Sprint("talk ", i))
					predicted, cached := 0, 0
					cached, _ = a.cached()
					_, _ = fmt.Sscan(a.header.Get("X-Kv-Predicted-Cached-Tokens"), &predicted)
					home := a.header.Get("X-Kv-Worker")
					if off := predicted - cached; off > 64 || off < -64 {
						wrong++
					}
					if homes = append(homes, home); turn > 0 && home != homes[len(homes)-1-len(talks)] {
						moved++
					}
					rng := rand.New(rand.NewPCG(uint64(turn), uint64(i))) //nolint:gosec // a test
					talks[i].Messages = append(talks[i].Messages, message{"assistant", a.text}, message{"user", prose(rng, 200, 300)})
				}
				n := int(cleared() - lost)
				t.Logf("turn %d: %d predictions are wrong, %d conversations moved, %d caches cleared", turn, wrong, moved, n)
				targets := 2 * max(v.cfg.Ranks, 1)
				most := 4 * targets // of those that the first losses of each do not show
				if v.events {
					most = 0
				}
				switch reset, after := turn == 2 || turn == 5, turn == 3 || turn == 6; {
				case reset:
					if !v.events {
						hidden = targets - n
					}
					if hidden < 0 || hidden > 1 || wrong > most { // one may have too few conversations
						t.Errorf("turn %d: %d caches were cleared, of %d, and %d predictions were wrong, of at most %d", turn, n, targets, wrong, most)
					}
				// What was computed between the loss and the first prompt that showed it is forgotten, too.
				case n > hidden, wrong > 2 && after, wrong > 0 && !after, moved > 2:
					t.Errorf("turn %d: %d predictions are wrong, %d conversations moved, %d caches cleared", turn, wrong, moved, n)
				default:
					hidden = 0
				}
				for _, w := range s.workers(t) {
					if slices.ContainsFunc(engines, func(e *engine.Engine) bool { return e.Addr() == w.Dial }) && w.Cache.Learned {
						t.Errorf("turn %d: learned a capacity of %d tokens", turn, w.Cache.Capacity)
					}
				}
			}
		})
	}
}
