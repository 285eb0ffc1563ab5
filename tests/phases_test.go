package tests

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const (
	phasesTotal   = "caddy_kv_router_phases_total"
	openIncidents = "caddy_kv_router_incidents"
)

// splitting are the engines that serve phases.
var splitting = []engine.Flavour{engine.VLLM, engine.SGLang, engine.TRTLLM}

// apart is a pool of simulated engines: prefill engines first, then decode engines.
type apart struct {
	*server
	prefill, decode []*engine.Engine
	site            string
	whole           *engine.Engine // one outside the pool, which answers as they do
}

// apartLease is for how long a prefill engine keeps a prompt, and apartLost how long a decode engine tries to get it.
// apartAlone is how long a phase waits for the other one. These are two seconds, one and thirty, by these engines'
// clocks. A busy machine makes all late.
const apartLease, apartLost, apartAlone = 200 * time.Second, 100 * time.Second, 3000 * time.Second

// startApart starts prefill and decode engines behind a router.
func startApart(t *testing.T, cfg engine.Config, prefills, decodes int, options ...string) *apart {
	t.Helper()
	return startVersions(t, cfg, make([]string, prefills), make([]string, decodes), options...)
}

// startVersions is startApart with the versions that the prefill and the decode engines report.
func startVersions(t *testing.T, cfg engine.Config, prefillVersions, decodeVersions []string, options ...string) *apart {
	t.Helper()
	prefills, decodes := len(prefillVersions), len(decodeVersions)
	p := &apart{whole: startSimulated(t, engine.Config{})}
	var all []*engine.Engine
	var roles strings.Builder
	for i := range prefills + decodes {
		role, list := engine.PrefillPhases, &p.prefill
		if i >= prefills {
			role, list = engine.DecodePhases, &p.decode
		}
		transfer := *cmp.Or(cfg.Transfer, new(engine.Transfer))
		transfer.Role, transfer.Lease, transfer.Lost = role, cmp.Or(transfer.Lease, apartLease), cmp.Or(transfer.Lost, apartLost)
		transfer.Alone = cmp.Or(transfer.Alone, apartAlone)
		one := cfg
		one.Name, one.Transfer = fmt.Sprint(role, i), &transfer
		one.Version = slices.Concat(prefillVersions, decodeVersions)[i]
		e := startSimulated(t, one)
		*list, all = append(*list, e), append(all, e)
		fmt.Fprintf(&roles, "worker %s {\nid %d\n", e.Addr(), i+1)
		if cfg.Flavour != engine.SGLang { // which reports it
			fmt.Fprintf(&roles, "role %s\n", role)
		}
		roles.WriteString("}\n")
	}
	block := "kv_router {\n" + roles.String() + "response_headers X-KV-\ntrust pins explain\n"
	proxy := "reverse_proxy " + addresses(all) + " {\n"
	for _, option := range options {
		if strings.HasPrefix(option, "lb_") { // which is the proxy's
			proxy += option + "\n"
		} else {
			block += option + "\n"
		}
	}
	p.site = block + proxy + "}\n}"
	p.server = startCaddy(t, p.site)
	_, _, _ = p.get(t.Context(), p.url+"/v1/models") // the pool then knows its workers
	eventually(t, "the engines to be found out", func() bool {
		for i, e := range all {
			var w struct{ Role string }
			p.api(t, http.MethodGet, defaultPool+"/workers/"+e.Addr(), nil, &w)
			if p.worker(t, e.Addr()).Engine.Type == "" || (w.Role == "prefill") != (i < prefills) {
				return false
			}
		}
		return true
	})
	return p
}

// long returns a chat that is worth splitting.
func long(topic int) chat {
	return simChat(strings.Repeat(fmt.Sprintf("topic %d goes on ", topic), 300))
}

// asWhole returns whether an answer is what one engine alone would give.
func (p *apart) asWhole(t *testing.T, path string, body []byte, a answer) bool {
	t.Helper()
	b := direct(p.whole).post(t.Context(), path, body)
	return a.ok() && b.ok() && a.text == b.text
}

// wasSplit returns whether two workers have served the request.
func (a answer) wasSplit() bool { return a.header.Get("X-KV-Prefill-Worker") != "" }

// settled checks that nothing of the requests is left.
func (p *apart) settled(t *testing.T) {
	t.Helper()
	p.booksAtZero(t)
	eventually(t, "no prompt to wait for a decode engine, and no body", func() bool {
		for _, e := range p.prefill {
			if e.Transfers().Held != 0 {
				return false
			}
		}
		return p.bodyBytes(t) == 0
	})
}

// TestPhasesAnswerAsOneEngine sends requests of each kind, which two engines serve.
func TestPhasesAnswerAsOneEngine(t *testing.T) {
	for _, f := range splitting {
		t.Run(string(f), func(t *testing.T) {
			patient := &engine.Transfer{Lease: 100 * time.Hour, Lost: 100 * time.Hour} // no prompt is lost
			p := startApart(t, engine.Config{Flavour: f, Transfer: patient}, 1, 2, "split always")
			n, before := 0, p.scrape(t)
			for i := range 3 {
				for _, stream := range []bool{false, true} {
					c := long(i)
					c.Stream = stream
					prompt := fmt.Sprintf(`{"model":"sim-8b","prompt":%q,"stream":%v}`, strings.Repeat(fmt.Sprint("text ", i), 300), stream)
					for path, body := range map[string][]byte{"/v1/chat/completions": c.body(), "/v1/completions": []byte(prompt)} {
						n++
						if a := p.post(t.Context(), path, body); !p.asWhole(t, path, body, a) || !a.wasSplit() {
							t.Errorf("%s, stream %v: status %d, header %v, err %v\n%.300q", path, stream, a.status, a.header, a.err, a.body)
						}
					}
				}
			}
			p.settled(t)
			if got := p.prefill[0].Transfers(); got.Fetched != int64(n) || got.Expired != 0 {
				t.Errorf("transfers %+v, want %d", got, n)
			}
			m := p.scrape(t)
			equal(t, m.value(workerOutcomes, `outcome="prefilled"`)-before.value(workerOutcomes, `outcome="prefilled"`), float64(n), "prefill phases of workers")
			for _, phase := range []string{"prefill", "decode"} {
				labels := []string{`phase="` + phase + `"`, `outcome="ok"`}
				equal(t, m.value(phasesTotal, labels...)-before.value(phasesTotal, labels...), float64(n), "%s phases", phase)
			}
			c := long(0)
			c.Nvext = []byte(`{"extra_fields":["worker_id"]}`)
			if a := p.chat(t.Context(), c); !bytes.Contains(a.body, []byte(`"prefill_worker_id":1,"prefill_dp_rank":0,"decode_worker_id":`)) {
				t.Errorf("nvext: %s", a.body)
			}
			x := p.explain(t, long(1).body())
			if x.Phases == nil || !x.Phases.Split || x.Phases.Prefill.Worker != 1 || x.Chosen.Worker == 1 {
				t.Errorf("explained: %+v, %+v", x.Chosen, x.Phases)
			}
		})
	}
}

// TestWholeRequests sends requests that no pair of engines can serve.
func TestWholeRequests(t *testing.T) {
	p := startApart(t, engine.Config{Flavour: engine.VLLM}, 1, 1, "split always")
	for name, body := range map[string]string{
		"several answers": `{"prompt":"x","n":2}`, // which the simulated engine refuses
		"only the engine": `{"prompt":"x","echo":true}`,
		"itself":          `{"prompt":"x","kv_transfer_params":{"do_remote_decode":true}}`,
		"one token":       `{"prompt":"x","max_tokens":1}`,
	} {
		body = strings.Replace(body, "{", `{"model":"sim-8b",`, 1)
		if a := p.post(t.Context(), "/v1/completions", []byte(body)); a.wasSplit() || name != "itself" && a.engine() != p.decode[0].Name() {
			t.Errorf("%s: status %d, answered by %s, header %v", name, a.status, a.engine(), a.header)
		}
		if x := p.explainAt(t, "/v1/completions", body); x.Phases == nil || x.Phases.Split || !strings.Contains(x.Phases.Why, name) {
			t.Errorf("%s: explained %+v", name, x.Phases)
		}
	}
	p.settled(t)
	q := startApart(t, engine.Config{Flavour: engine.TRTLLM}, 1, 1, "split always")
	image := `{"model":"sim-8b","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y"}}]}]}`
	if x := q.explain(t, []byte(image)); x.Phases == nil || x.Phases.Split || !strings.Contains(x.Phases.Why, "media") {
		t.Errorf("an image: explained %+v", x.Phases)
	}
}

// TestAnswerEndsWithItsPrefill has the first token end the answer.
func TestAnswerEndsWithItsPrefill(t *testing.T) {
	for _, f := range []engine.Flavour{engine.VLLM, engine.TRTLLM} {
		p := startApart(t, engine.Config{Flavour: f, AnswerTokens: 1}, 1, 1, "split always")
		before := p.scrape(t)
		for _, stream := range []bool{false, true} {
			c := long(1)
			c.Stream = stream
			a := p.chat(t.Context(), c)
			if !a.ok() || a.text != "" || stream != (a.engine() == p.decode[0].Name()) || bytes.Contains(a.body, []byte(`"ctx_request_id"`)) {
				t.Errorf("%s, stream %v: status %d, %s of %s", f, stream, a.status, a.body, a.engine())
			}
		}
		p.wantFigures(t, before, []figure{{workerOutcomes, []string{`worker="` + p.prefill[0].Addr() + `"`, `outcome="ok"`}, 1}})
		equal(t, p.scrape(t).value("caddy_kv_router_unfetched_prompts_total", `worker="`+p.prefill[0].Addr()+`"`), 0, "%s: prompts that were not fetched", f)
		if f == engine.VLLM {
			text := strings.Repeat("goes on ", 300)
			for path, body := range map[string]string{
				"/v1/messages":  `{"model":"sim-8b","max_tokens":100,"messages":[{"role":"user","content":"` + text + `"}]}`,
				"/v1/responses": `{"model":"sim-8b","input":"` + text + `"}`,
			} {
				if a := p.post(t.Context(), path, []byte(body)); a.status != 200 || (a.engine() == p.decode[0].Name()) != (path == "/v1/responses") {
					t.Errorf("%s: status %d of %s, %.300q", path, a.status, a.engine(), a.body)
				}
			}
		}
		equal(t, p.scrape(t).value(openIncidents), 0, "%s: conditions", f)
		p.settled(t)
	}
}

// TestPrefillWorkerRestarts has the only prefill worker of a pool refuse requests for a moment. Its decode engine serves no
// whole requests, so the router tries again for as long as the operator allows.
func TestPrefillWorkerRestarts(t *testing.T) {
	p := startApart(t, engine.Config{Flavour: engine.SGLang}, 1, 1, "lb_try_duration 20s")
	p.prefill[0].Kill()
	back := time.AfterFunc(time.Second, func() {
		if err := p.prefill[0].Restart(); err != nil {
			t.Error(err)
		}
	})
	defer back.Stop()
	if a := p.chat(t.Context(), long(1)); !a.ok() || !a.wasSplit() {
		t.Errorf("status %d, header %v, %.300q", a.status, a.header, a.body)
	}
	one := []byte(`{"model":"sim-8b","prompt":"x","max_tokens":1}`) // which would go whole if a worker served that
	if a := p.post(t.Context(), "/v1/completions", one); !a.ok() || !a.wasSplit() {
		t.Errorf("one token: status %d, header %v, %.300q", a.status, a.header, a.body)
	}
	p.settled(t)
}

// TestFaultsOfPhases makes a phase fail. The client sees nothing of it, and a healthy worker is not
// marked down.
func TestFaultsOfPhases(t *testing.T) {
	takesSeconds(t)
	for name, v := range map[string]struct {
		prefills int
		fail     func(p *apart) error
		reason   string // of the retry
		split    bool   // the answer comes of another pair
		only     engine.Flavour
	}{
		"prefill answers 500":  {2, func(p *apart) error { return p.prefill[0].SetFault(engine.Fault{Kind: engine.Status, Status: 500}) }, "prefill", true, ""},
		"prefill is busy":      {2, func(p *apart) error { return p.prefill[0].SetFault(engine.Fault{Kind: engine.Status, Status: 429}) }, "prefill", true, ""},
		"prefill resets":       {2, func(p *apart) error { return p.prefill[0].SetFault(engine.Fault{Kind: engine.Reset}) }, "prefill", true, ""},
		"prefill is gone":      {2, func(p *apart) error { p.prefill[0].Kill(); return nil }, "prefill", true, ""},
		"decode resets":        {1, func(p *apart) error { return p.decode[0].SetFault(engine.Fault{Kind: engine.Reset, Count: 2}) }, "broken", true, engine.VLLM},
		"decode is gone":       {1, func(p *apart) error { p.decode[0].Kill(); return nil }, "refused", true, ""},
		"the only one is gone": {1, func(p *apart) error { p.prefill[0].Kill(); return nil }, "prefill", false, engine.VLLM},
		"the only one fails":   {1, func(p *apart) error { return p.prefill[0].SetFault(engine.Fault{Kind: engine.Status, Status: 500}) }, "prefill", false, engine.VLLM},
		"the transfer fails":   {1, func(p *apart) error { return p.decode[0].SetFault(engine.Fault{Kind: engine.FailTransfer}) }, "transfer", false, engine.VLLM},
	} {
		for _, f := range splitting {
			if v.only != "" && v.only != f {
				continue
			}
			for _, stream := range []bool{false, true} {
				t.Run(fmt.Sprint(name, "/", f, "/", stream), func(t *testing.T) {
					decodes := 1
					if v.reason == "broken" || v.reason == "refused" { // the other one gets the same blocks
						decodes = 2
					}
					p := startApart(t, engine.Config{Flavour: f}, v.prefills, decodes, "split always", "policy random")
					noError(t, v.fail(p))
					before := p.scrape(t).value(retriesTotal, `reason="`+v.reason+`"`)
					topic := 0
					eventually(t, "a retry", func() bool {
						topic++
						c := long(topic)
						c.Stream = stream
						a := p.chat(t.Context(), c)
						if !p.asWhole(t, "/v1/chat/completions", c.body(), a) {
							t.Fatalf("status %d, err %v, %.300q", a.status, a.err, a.body)
						}
						retried := p.scrape(t).value(retriesTotal, `reason="`+v.reason+`"`) > before
						headerWasOut := stream && v.reason == "transfer" // it names the first pair
						if retried && !headerWasOut && a.wasSplit() != v.split {
							t.Errorf("split: %v", a.wasSplit())
						}
						return retried || p.logged(t, markedDown) > 0 // then a look at the worker was sooner than the request
					})
					m := p.scrape(t)
					if decodes == 1 && m.value("caddy_kv_router_worker_available", `worker="`+p.decode[0].Addr()+`"`) != 1 {
						t.Error("the decode worker is marked down")
					}
					p.settled(t)
				})
			}
		}
	}
}

// TestPrefillWorkerVanishes has a prefill worker die before the transfer, and the decode engine wait.
func TestPrefillWorkerVanishes(t *testing.T) {
	takesSeconds(t)
	p := startApart(t, engine.Config{Transfer: &engine.Transfer{Lost: 100 * time.Hour}}, 1, 1, "split always")
	setFault(t, p.decode[0], engine.Fault{Kind: engine.FailTransfer, Count: 1})
	answered := make(chan answer)
	go func() { answered <- p.chat(t.Context(), long(1)) }()
	eventually(t, "the prefill phase to end", func() bool {
		n, _ := posts(p.decode[0])
		return n == 1 && p.prefill[0].Transfers().Held == 1
	})
	p.prefill[0].Kill()
	if a := <-answered; !a.ok() || a.wasSplit() {
		t.Errorf("status %d, header %v", a.status, a.header)
	}
	eventually(t, "the prompt to count as not fetched", func() bool {
		return p.scrape(t).value("caddy_kv_router_unfetched_prompts_total", `worker="`+p.prefill[0].Addr()+`"`) == 1
	})
	p.settled(t)
}

// TestPrefillWorkerVanishesLater has a prefill worker die after the transfer. Answers that are not
// streamed go on after one failed look at it, and after two if they may not be tried again.
func TestPrefillWorkerVanishesLater(t *testing.T) {
	takesSeconds(t)
	for _, v := range []struct {
		budget string
		steps  float64 // as slow
		took   time.Duration
	}{{"20% 10/s", 2500, 10500 * time.Millisecond}, {"0% 0/s", 4600, 20500 * time.Millisecond}} {
		if v.steps > 4000 && !inLong {
			continue
		}
		t.Run(v.budget[:2], func(t *testing.T) {
			p := startApart(t, engine.Config{AnswerTokens: 64}, 1, 1, "split always", "retry_budget "+v.budget)
			setFault(t, p.decode[0], engine.Fault{Kind: engine.Slow, Factor: v.steps, Count: 4})
			before, begun := p.scrape(t).value(retriesTotal), time.Now()
			var all sync.WaitGroup
			for i := range 4 {
				all.Go(func() {
					if a := p.chat(t.Context(), long(i)); !a.ok() || !a.wasSplit() {
						t.Errorf("status %d, header %v, %.300q", a.status, a.header, a.body)
					}
				})
			}
			eventually(t, "the transfers", func() bool { return p.prefill[0].Transfers().Fetched == 4 })
			p.prefill[0].Kill()
			all.Wait()
			took := time.Since(begun)
			t.Logf("the answers took %v", took)
			if took < v.took {
				t.Errorf("that is too short")
			}
			equal(t, p.scrape(t).value(retriesTotal)-before, 0, "retries")
			p.settled(t)
		})
	}
}

// TestDecodeWorkerRefuses has the decode worker refuse what the prefill worker has accepted.
func TestDecodeWorkerRefuses(t *testing.T) {
	const unfetched = "caddy_kv_router_unfetched_prompts_total"
	for _, v := range []struct {
		status, times, want int
		avoided             bool // the pair, later
	}{{400, 1, 200, true}, {403, 1, 200, true}, {400, 2, 400, false}, {429, 1, 200, false}} {
		t.Run(fmt.Sprint(v.status, "/", v.times), func(t *testing.T) {
			p := startApart(t, engine.Config{Flavour: engine.TRTLLM}, 1, 1, "split always")
			setFault(t, p.decode[0], engine.Fault{Kind: engine.Status, Status: v.status, Count: v.times})
			if a := p.chat(t.Context(), long(1)); a.status != v.want {
				t.Errorf("status %d, %.300q", a.status, a.body)
			}
			equal(t, p.scrape(t).value(unfetched, `worker="`+p.prefill[0].Addr()+`"`), 1, "prompts that were not fetched")
			if a := p.chat(t.Context(), long(2)); !a.ok() || a.wasSplit() == v.avoided {
				t.Errorf("then: status %d, header %v", a.status, a.header)
			}
			p.booksAtZero(t)
		})
	}
	p := startApart(t, engine.Config{Flavour: engine.SGLang}, 1, 1, "split always", "lb_try_duration 5s")
	setFault(t, p.decode[0], engine.Fault{Kind: engine.FailTransfer, Count: 1})
	if a := p.chat(t.Context(), long(1)); !a.ok() {
		t.Errorf("status %d, %.300q", a.status, a.body)
	}
	equal(t, p.scrape(t).value(unfetched, `worker="`+p.prefill[0].Addr()+`"`), 0, "prompts that were not fetched, of an SGLang, which keeps none")
	p.settled(t)
}

// TestSlowTransfer has a transfer take longer than the router predicts. To cancel it could wedge a TensorRT-LLM.
func TestSlowTransfer(t *testing.T) {
	takesSeconds(t)
	slow := &engine.Transfer{Fixed: 1_200_000, Lost: 100 * time.Hour, Lease: 100 * time.Hour} // 12 s: the engines are fast
	p := startApart(t, engine.Config{Flavour: engine.TRTLLM, Transfer: slow}, 1, 2, "split always", "timeouts {\nfirst_token 2s\n}")
	drain := func(decode int, how string) {
		p.api(t, http.MethodPost, defaultPool+"/workers/"+p.decode[decode].Addr()+how, nil, nil)
	}
	before := p.scrape(t).value(retriesTotal)
	var all sync.WaitGroup
	drain(1, "/drain")
	time.AfterFunc(2*time.Second, func() {
		drain(1, "/undrain")
		drain(0, "/drain?move") // which waits for the first token
	})
	for _, stream := range []bool{false, true} {
		all.Go(func() {
			c := long(1)
			c.Stream = stream
			if a := p.chat(t.Context(), c); !a.ok() || !a.wasSplit() {
				t.Errorf("stream %v: status %d, header %v, %.300q", stream, a.status, a.header, a.body)
			}
		})
	}
	all.Wait()
	equal(t, p.scrape(t).value(retriesTotal)-before, 0, "retries")
	p.settled(t)
}

// TestMooncake has a vLLM transfer prompts by the names in its bootstrap server, over a restart.
func TestMooncake(t *testing.T) {
	of := func(role engine.Role) *engine.Engine {
		return startSimulated(t, engine.Config{Flavour: engine.VLLM, Transfer: &engine.Transfer{Role: role}})
	}
	prefill, decode := of(engine.PrefillPhases), of(engine.DecodePhases)
	_, port, _ := strings.Cut(prefill.SideAddr(), ":")
	s := startCaddy(t, fmt.Sprintf(`kv_router %s %s {
		split always
		response_headers X-KV-
		worker * {
			role decode
			mooncake_port 1
		}
		worker %[1]s {
			role prefill
			mooncake_port %[3]s
		}
	}`, prefill.Addr(), decode.Addr(), port))
	parts := func() bool {
		a := s.chat(t.Context(), long(1))
		if !a.ok() {
			t.Errorf("status %d: %.300q", a.status, a.body)
		}
		return a.wasSplit()
	}
	eventually(t, "prompts to be transferred", parts)
	prefill.Kill()
	if parts() {
		t.Error("a dead engine transfers prompts")
	}
	revive(t, prefill)
	eventually(t, "prompts to be transferred again", parts)
	s.booksAtZero(t)
}

// TestRolesWithoutTheOther has pools with one role only.
func TestRolesWithoutTheOther(t *testing.T) {
	for _, v := range []struct {
		flavour           engine.Flavour
		prefills, decodes int
		status            int
		said              string
	}{
		{engine.VLLM, 1, 0, 200, ""},
		{engine.VLLM, 0, 1, 200, ""},
		{engine.SGLang, 0, 1, 503, "serve only one phase"},
		{engine.SGLang, 1, 0, 503, "serve only one phase"},
	} {
		p := startApart(t, engine.Config{Flavour: v.flavour}, v.prefills, v.decodes)
		if a := p.chat(t.Context(), long(1)); a.status != v.status || !strings.Contains(string(a.body), v.said) {
			t.Errorf("%+v: status %d, %.300q", v, a.status, a.body)
		}
		if p.scrape(t).value(openIncidents) == 0 {
			t.Errorf("%+v: no condition tells it", v)
		}
	}
}

// TestPairsHaveOneVersion has engines of several versions, as in a rolling update. What has no partner of its
// version serves whole requests, or nothing.
func TestPairsHaveOneVersion(t *testing.T) {
	for _, v := range []struct {
		name            string
		flavour         engine.Flavour
		prefill, decode string   // versions
		pairs           []string // ids of the workers that serve split requests; prefill engines come first
		split           int      // of 12 requests
		status          int
	}{
		{"NewDecode", engine.VLLM, "1", "1 2", []string{"1 2"}, 6, 200}, // the other half goes whole to the new one
		{"NewPrefill", engine.VLLM, "1 2", "1", []string{"1 3"}, 12, 200},
		{"Both", engine.VLLM, "1 2", "1 2", []string{"1 3", "2 4"}, 6, 200},
		{"None", engine.VLLM, "1 1", "2", nil, 0, 200},
		{"NewDecode", engine.SGLang, "1", "1 2", []string{"1 2"}, 12, 200},
		{"NewPrefill", engine.SGLang, "1 2", "1", []string{"1 3"}, 12, 200},
		{"Both", engine.SGLang, "1 2", "1 2", []string{"1 3", "2 4"}, 12, 200},
		{"None", engine.SGLang, "1", "2", nil, 0, 503},
	} {
		t.Run(v.name+"/"+string(v.flavour), func(t *testing.T) {
			cfg := engine.Config{Flavour: v.flavour}
			p := startVersions(t, cfg, strings.Fields(v.prefill), strings.Fields(v.decode), "split always", "policy round_robin")
			pairs, split := make(map[string]bool), 0
			for i := range 12 {
				a := p.chat(t.Context(), long(i))
				if a.status != v.status {
					t.Fatalf("request %d: status %d, %.300s", i, a.status, a.body)
				}
				if a.wasSplit() {
					split++
					pairs[a.header.Get("X-KV-Prefill-Worker")+" "+a.header.Get("X-KV-Worker")] = true
				}
			}
			if got := slices.Sorted(maps.Keys(pairs)); !slices.Equal(got, v.pairs) || split < v.split {
				t.Errorf("%d requests were split, over %q, want %d over %q", split, got, v.split, v.pairs)
			}
			p.settled(t)
		})
	}
}

// TestPinnedPhases names the workers of both phases.
func TestPinnedPhases(t *testing.T) {
	q := startApart(t, engine.Config{Flavour: engine.VLLM}, 2, 2)
	for prefill := 1; prefill <= 2; prefill++ {
		for decode := 3; decode <= 4; decode++ {
			c := simChat("short")
			c.Nvext = fmt.Appendf(nil, `{"prefill_worker_id":%d,"decode_worker_id":%d}`, prefill, decode)
			a := q.chat(t.Context(), c)
			if !a.ok() || a.header.Get("X-KV-Prefill-Worker") != fmt.Sprint(prefill) || a.header.Get("X-KV-Worker") != fmt.Sprint(decode) {
				t.Errorf("%s: status %d, header %v, %.200q", c.Nvext, a.status, a.header, a.body)
			}
		}
	}
	for nvext, want := range map[string]string{
		`{"prefill_worker_id":3}`:                     "not for prefills",
		`{"prefill_worker_id":9}`:                     "no worker of this pool",
		`{"prefill_worker_id":1,"prefill_dp_rank":5}`: "has no rank 5",
		`{"prefill_dp_rank":5}`:                       "rank 5",
	} {
		c := simChat("short")
		c.Nvext = []byte(nvext)
		if a := q.chat(t.Context(), c); a.status != 400 || !strings.Contains(string(a.body), want) {
			t.Errorf("%s: status %d, %.200q", nvext, a.status, a.body)
		}
	}
	q.settled(t)
}

// TestReloadBetweenPhases reloads the configuration while a prefill phase is under way.
func TestReloadBetweenPhases(t *testing.T) {
	for _, f := range splitting {
		p := startApart(t, engine.Config{Flavour: f}, 1, 1, "split always")
		reloaded := make(chan struct{})
		setFault(t, p.prefill[0], engine.Fault{Kind: engine.Hang, Count: 1, Until: reloaded})
		answered := make(chan answer)
		go func() { answered <- p.chat(t.Context(), long(1)) }()
		eventually(t, "the prefill phase", func() bool { return p.scrape(t).value(leases) > 0 })
		p.mustReload(t, p.site+"\n# again")
		close(reloaded)
		if a := <-answered; !a.ok() || !a.wasSplit() {
			t.Errorf("%s: status %d, header %v, %.300q", f, a.status, a.header, a.body)
		}
		p.settled(t)
	}
}

// TestStormOfPhases has engines fail and clients leave at random. Nothing is left of any request. For
// 10,000 requests to each type of engine:
//
//	KVROUTER_LONG=1 go test ./tests -run TestStormOfPhases -v -timeout 30m
func TestStormOfPhases(t *testing.T) {
	takesSeconds(t)
	requests := 300
	if inLong {
		requests = 10_000
	}
	for _, f := range splitting {
		t.Run(string(f), func(t *testing.T) {
			const most = 5 * time.Minute // 3 s: the engines are fast
			transfer := &engine.Transfer{Lease: most, Lost: most, Alone: most}
			p := startApart(t, engine.Config{Flavour: f, Transfer: transfer}, 2, 2, "split always", "affinity {\nttl 1s\n}")
			all, before := append(append([]*engine.Engine(nil), p.prefill...), p.decode...), runtime.NumGoroutine()
			over, served := make(chan struct{}), atomic.Int64{}
			var faults sync.WaitGroup
			faults.Go(func() {
				kinds := []engine.FaultKind{engine.Reset, engine.CloseConn, engine.Status, engine.NoFault}
				rare := []engine.FaultKind{engine.FailTransfer, engine.Hang}
				for {
					select {
					case <-over:
						return
					case <-time.After(100 * time.Millisecond):
					}
					e, kind := all[rand.IntN(len(all))], kinds[rand.IntN(len(kinds))]
					grave := served.Load() > int64(requests/3) // requests then avoid a pair of workers for a minute
					if grave && rand.IntN(50) == 0 {
						kind = rare[rand.IntN(len(rare))]
					}
					_ = e.SetFault(engine.Fault{Kind: kind, Count: 1 + rand.IntN(3)})
					if grave && rand.IntN(20) == 0 {
						e.Kill()
						if err := e.Restart(); err != nil {
							t.Error(err)
						}
					}
				}
			})
			next := make(chan int)
			var clients sync.WaitGroup
			for range 32 {
				clients.Go(func() {
					for i := range next {
						ctx, leave := context.WithTimeout(t.Context(), 20*time.Second)
						if i%3 == 0 {
							leave()
							ctx, leave = context.WithTimeout(t.Context(), time.Duration(rand.IntN(40))*time.Millisecond)
						}
						c := long(i % 50)
						c.Stream = i%2 == 0
						if p.chat(ctx, c, "X-Session-Id", fmt.Sprint(i%100)).ok() {
							served.Add(1)
						}
						leave()
					}
				})
			}
			for i := range requests {
				next <- i
			}
			close(next)
			clients.Wait()
			close(over)
			faults.Wait()
			for _, e := range all {
				_ = e.SetFault(engine.Fault{})
			}
			eventually(t, "all phases to end", func() bool { return p.scrape(t).value(leases) == 0 })
			p.settled(t)
			eventually(t, "the sessions to end", func() bool { return p.scrape(t).value(sessions) == 0 })
			eventually(t, "the goroutines to end", func() bool { // connections that are kept have some
				http.DefaultClient.CloseIdleConnections()
				return runtime.NumGoroutine() < before+100
			})
			t.Logf("%d of %d served, goroutines %d, then %d", served.Load(), requests, before, runtime.NumGoroutine())
			for _, e := range p.prefill {
				t.Logf("%s: %+v", e.Name(), e.Transfers())
			}
		})
	}
}

// TestDeadPrefillWorkerIsNotAsked has the only prefill worker die. After it is marked down, requests go
// whole to the decode worker at once.
func TestDeadPrefillWorkerIsNotAsked(t *testing.T) {
	takesSeconds(t)
	p := startApart(t, engine.Config{}, 1, 1, "split always")
	p.prefill[0].Kill()
	eventually(t, "the mark", func() bool { return p.logged(t, "worker is marked down") > 0 })
	before := p.scrape(t).value(retriesTotal)
	for i := range 16 {
		if a := p.chat(t.Context(), long(i)); !a.ok() || a.wasSplit() {
			t.Errorf("status %d, header %v", a.status, a.header)
		}
	}
	if n := p.scrape(t).value(retriesTotal) - before; n > 1 {
		t.Errorf("%v phases were sent to it", n)
	}
}
