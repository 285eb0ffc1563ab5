package engine

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher/peer"
)

func withEvents(cfg Config, events EventConfig) Config {
	cfg.Events = &events
	return cfg
}

func (e *Engine) complete(t *testing.T, body doc, header ...string) reply {
	t.Helper()
	if body["max_tokens"] == nil {
		body["max_tokens"] = 1
	}
	body["ignore_eos"] = true
	r := post(t.Context(), e.completionURL(), body, header...)
	r.checkOK(t)
	return r
}

// TestEventsOfVLLM does what was done with a real one, with the same batches in return.
func TestEventsOfVLLM(t *testing.T) {
	noneLeft(t)
	e := start(t, withEvents(Config{BlockSize: 32, Blocks: 40, LoRAs: []string{"other", "ad1"}}, EventConfig{}))
	s := follow(t, e, 0, 0)
	// The block behind the prompt's has tokens of both, the next one of the answer only.
	e.complete(t, doc{"prompt": tokens(1, 80), "max_tokens": 60})
	b := s.expect("BlockStored 2 first=true GPU")
	if !slices.Equal(b[0].tokens, ids(tokens(1, 64))) || b[0].extra != "[<nil> <nil>]" {
		t.Errorf("event %+v", b[0])
	}
	up := b[0].hashes[1]
	for range 2 {
		if b = s.expect("BlockStored 1 first=false GPU"); b[0].parent != up {
			t.Errorf("parent %x, want %x", b[0].parent, up)
		}
		up = b[0].hashes[0]
	}
	// A hit is silent, but for the last block of a prompt of full blocks only.
	e.complete(t, doc{"prompt": tokens(1, 80)})
	s.silent()
	e.complete(t, doc{"prompt": tokens(1, 64)})
	if again := s.expect("BlockStored 1 first=false GPU"); !slices.Equal(again[0].tokens, ids(tokens(33, 32))) {
		t.Errorf("event %+v", again[0])
	}
	e.complete(t, doc{"prompt": tokens(1, 80), "vllm_xargs": doc{"kv_cache_report_mode": "full"}})
	s.expect("BlockStored 2 first=true GPU")
	for _, tc := range []struct {
		body                 doc
		header               []string
		extra, lora, session string
	}{
		{doc{"cache_salt": "t-A"}, nil, "[[t-A] <nil> <nil>]", "", ""},
		{doc{"model": "ad1"}, nil, "[[ad1] [ad1] [ad1]]", "ad1", ""},
		{doc{"model": "ad1", "cache_salt": "s1"}, nil, "[[ad1 s1] [ad1] [ad1]]", "ad1", ""},
		{doc{"cache_salt": "b", "session_id": "one"}, []string{"X-Session-ID", "two"}, "[[b] <nil> <nil>]", "", "one"},
		{doc{"cache_salt": "c", "session_id": 7}, []string{"X-Session-ID", "two"}, "[[c] <nil> <nil>]", "", "two"},
	} {
		tc.body["prompt"] = tokens(1, 100)
		e.complete(t, tc.body, tc.header...)
		if b := s.expect("BlockStored 3 first=true GPU"); b[0].extra != tc.extra || b[0].lora != tc.lora || b[0].session != tc.session {
			t.Errorf("%v: %+v", tc.body, b[0])
		}
	}
	// A request that needs all room evicts the tails first, and each copy of a block.
	e.complete(t, doc{"prompt": tokens(5000, 40*32-1)})
	b = s.batch()
	removed := 0
	for ; b[removed].kind == "BlockRemoved"; removed++ {
		if len(b[removed].hashes) != 1 || b[removed].medium != "GPU" {
			t.Fatalf("event %+v", b[removed])
		}
	}
	if removed != 2+2+1+5*3 || short(b[removed:]) != "BlockStored 39 first=true GPU" {
		t.Errorf("%d removed, then %s", removed, short(b[removed:]))
	}
}

// TestClearIsLazy clears the cache of an idle vLLM: the event comes with the next step.
func TestClearIsLazy(t *testing.T) {
	e := start(t, withEvents(Config{BlockSize: 32}, EventConfig{}))
	s := follow(t, e, 0, 0)
	e.complete(t, doc{"prompt": tokens(1, 100)})
	s.expect("BlockStored 3 first=true GPU")
	if device, _ := e.Holds(0, ids(tokens(1, 100)), "", ""); device != 3 {
		t.Errorf("%d blocks are held", device)
	}
	if v := post(t.Context(), e.URL()+ResetPath, "").json(t); at(v, "success") != true {
		t.Errorf("answer %v", v)
	}
	s.silent()
	if st := e.Events()[0]; st.Quiet() || st.Unpublished != 1 || st.DeviceBlocks != 0 {
		t.Errorf("state %+v", st)
	}
	if device, _ := e.Holds(0, ids(tokens(1, 100)), "", ""); device != 0 {
		t.Errorf("%d blocks are held", device)
	}
	e.complete(t, doc{"prompt": tokens(1, 100)})
	s.expect("AllBlocksCleared 0 first=true ; BlockStored 3 first=true GPU")
	done := make(chan reply)
	go func() {
		done <- post(t.Context(), e.completionURL(), doc{"prompt": tokens(9, 10), "max_tokens": 100000, "ignore_eos": true})
	}()
	eventually(t, "a request runs", func() bool { return e.State().Ranks[0].Running == 1 })
	if v := post(t.Context(), e.URL()+ResetPath, "").json(t); at(v, "success") != false {
		t.Errorf("answer %v while a request runs", v)
	}
	e.Kill()
	<-done
}

// TestChunks prefills a prompt in three steps: each has its batch.
func TestChunks(t *testing.T) {
	e := start(t, withEvents(Config{TokenBudget: 40}, EventConfig{}))
	s := follow(t, e, 0, 0)
	e.complete(t, doc{"prompt": tokens(1, 100)})
	s.expect("BlockStored 2 first=true GPU")
	s.expect("BlockStored 3 first=false GPU")
	s.expect("BlockStored 1 first=false GPU")
}

// TestEventRanks has two ranks with publishers of their own, and equal names.
func TestEventRanks(t *testing.T) {
	a := start(t, withEvents(Config{Ranks: 2}, EventConfig{Topic: "dp"}))
	private := start(t, withEvents(Config{}, EventConfig{HashSeed: 5}))
	body := doc{"prompt": tokens(1, 100)}
	a.complete(t, body, "X-data-parallel-rank", "0")
	a.complete(t, body, "X-data-parallel-rank", "1")
	private.complete(t, body)
	quiet(t, a)
	quiet(t, private)
	var names [3]uint64
	for i, of := range []*Engine{a, a, private} {
		rank := i % 2
		_, replay := of.EventEndpoints(rank)
		d, err := peer.Dealer(hostPort(replay))
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		got, err := d.Replay(0)
		if err != nil || len(got) != 2 || string(got[0][0]) != map[bool]string{true: "dp"}[of == a] {
			t.Fatalf("%d: %d messages, %v", i, len(got), err)
		}
		events, dp := tellBatch(t, got[0][2])
		if dp != rank {
			t.Errorf("%d: rank %d", i, dp)
		}
		names[i] = events[0].hashes[5]
	}
	if names[0] != names[1] || names[0] == names[2] {
		t.Errorf("names %x", names)
	}
	first, _ := a.EventEndpoints(0)
	if second, _ := a.EventEndpoints(1); second != "tcp://"+must(offsetPort(hostPort(first), 1)) {
		t.Errorf("rank 0 at %s, rank 1 at %s", first, second)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestEventsAfterRestart has numbers begin again, at the same address.
func TestEventsAfterRestart(t *testing.T) {
	noneLeft(t)
	e := start(t, withEvents(Config{}, EventConfig{First: 1}))
	before, _ := e.EventEndpoints(0)
	s := follow(t, e, 0, 1)
	e.complete(t, doc{"prompt": tokens(1, 40)})
	s.batch()
	e.Kill()
	if e.Events() != nil {
		t.Error("a killed engine has events")
	}
	if _, err := s.conn.Next(); err == nil {
		t.Error("the connection outlived the engine")
	}
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	if after, _ := e.EventEndpoints(0); after != before {
		t.Errorf("moved from %s to %s", before, after)
	}
	s = follow(t, e, 0, 1)
	e.complete(t, doc{"prompt": tokens(1, 40)})
	s.expect("BlockStored 2 first=true GPU")
}

// TestEventsDial has two ranks connect to listeners on consecutive ports.
func TestEventsDial(t *testing.T) {
	var addrs []string
	listeners, err := listenRanks(&addrs, 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(listeners)
	e := start(t, withEvents(Config{Ranks: 2}, EventConfig{Dial: addrs[0]}))
	for i, ln := range listeners {
		c, err := peer.Accept(ln, "")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		eventually(t, "the subscription arrived", func() bool { return e.Events()[i].Subscribers == 1 })
		e.complete(t, doc{"prompt": tokens(1, 40)}, "X-data-parallel-rank", fmt.Sprint(i))
		m, err := c.Next()
		if err != nil {
			t.Fatal(err)
		}
		if _, rank := tellBatch(t, m.Payload); rank != i || m.Seq != 0 {
			t.Errorf("rank %d, number %d from rank %d", rank, m.Seq, i)
		}
	}
}

// TestSources asks engines where they publish.
func TestSources(t *testing.T) {
	for _, form := range []Sources{SourcesByRank, SourcesList, SourcesWrapped} {
		e := start(t, withEvents(Config{Ranks: 2}, EventConfig{Topic: "kv", Sources: form, NoReplay: form == SourcesList}))
		v := get(t.Context(), e.URL()+"/kv_event_sources").json(t)
		path := map[Sources][]any{SourcesByRank: {"1"}, SourcesList: {1}, SourcesWrapped: {"sources", 1}}[form]
		one := at(v, path...)
		pub, replay := e.EventEndpoints(1)
		pub = strings.Replace(pub, "127.0.0.1", "*", 1) // vLLM listens only at such addresses
		if at(one, "endpoint") != pub || text0(at(one, "replay_endpoint")) != replay || at(one, "topic") != "kv" || number(at(one, "buffer_steps")) != 10000 {
			t.Errorf("%s: %v", form, v)
		}
	}
	for name, cfg := range map[string]Config{"hidden": withEvents(Config{}, EventConfig{Sources: NoSources}), "off": {}} {
		e := start(t, cfg)
		if r := get(t.Context(), e.URL()+"/kv_event_sources"); r.status != http.StatusNotFound {
			t.Errorf("%s: status %d", name, r.status)
		}
	}
	e := start(t, withEvents(Config{Flavour: SGLang, Ranks: 2, BlockSize: 64}, EventConfig{Topic: "x"}))
	kv := at(get(t.Context(), e.URL()+"/server_info").json(t), "kv_events")
	pub, _ := e.EventEndpoints(0)
	_, port, _ := net.SplitHostPort(hostPort(pub))
	want := fmt.Sprint(map[string]any{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "topic": "x", "block_size": 64, "dp_size": 2})
	if fmt.Sprint(kv) != want {
		t.Errorf("%v, want %s", kv, want)
	}
	off := start(t, Config{Flavour: SGLang})
	if v := get(t.Context(), off.URL()+"/server_info").json(t); has(v, "kv_events") {
		t.Errorf("%v", v)
	}
}

// TestEventConfig refuses what makes no sense.
func TestEventConfig(t *testing.T) {
	for name, cfg := range map[string]Config{
		"flavour":  withEvents(Config{Flavour: LlamaCpp}, EventConfig{}),
		"host":     withEvents(Config{}, EventConfig{HostBlocks: 5}),
		"both":     withEvents(Config{}, EventConfig{Port: 2000, Dial: "127.0.0.1:2000"}),
		"overlap":  withEvents(Config{Ranks: 3}, EventConfig{Port: 2000, ReplayPort: 2002}),
		"port":     withEvents(Config{Ranks: 3}, EventConfig{Port: 65534}),
		"dial":     withEvents(Config{}, EventConfig{Dial: "here"}),
		"layout":   withEvents(Config{}, EventConfig{ReplayLayout: "x"}),
		"encoding": withEvents(Config{}, EventConfig{Encoding: "x"}),
		"hashes":   withEvents(Config{}, EventConfig{Hashes: "x"}),
		"sources":  withEvents(Config{}, EventConfig{Sources: "x"}),
		"buffer":   withEvents(Config{}, EventConfig{Buffer: -1}),
	} {
		if e, err := Start(cfg); err == nil {
			e.Close()
			t.Errorf("%s: it started", name)
		}
	}
	taken, err := canned.Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if e, err := Start(withEvents(Config{}, EventConfig{Port: taken.Addr().(*net.TCPAddr).Port})); err == nil {
		e.Close()
		t.Error("it listens on a port in use")
	}
}

// TestEventControl drives events through the control endpoint.
func TestEventControl(t *testing.T) {
	e := start(t, withEvents(Config{}, EventConfig{Buffer: 50}))
	url := e.ControlURL() + "/_engine/events"
	s := follow(t, e, 0, 0)
	post(t.Context(), url+"/faults", EventFault{Kind: DropBatches, Count: 2}).checkOK(t)
	e.complete(t, doc{"prompt": tokens(1, 40)})
	e.complete(t, doc{"prompt": tokens(100, 40)})
	post(t.Context(), url+"/faults", EventFault{Kind: DelayBatches, DelayMS: 3600e3}).checkOK(t)
	e.complete(t, doc{"prompt": tokens(200, 40)})
	eventually(t, "one batch waits", func() bool { s := e.Events()[0]; return s.Next == 2 && s.Pending == 1 })
	if v := get(t.Context(), url).json(t); number(at(v, "ranks", 0, "next")) != 2 || number(at(v, "ranks", 0, "pending")) != 1 ||
		number(at(v, "ranks", 0, "device_blocks")) != 6 || number(at(v, "ranks", 0, "subscribers")) != 1 {
		t.Errorf("state %v", v)
	}
	post(t.Context(), url+"/faults", "{}").checkOK(t)
	s.next = 2
	s.batch()
	if v := post(t.Context(), url+"/holds", doc{"tokens": tokens(1, 40)}).json(t); number(at(v, "device")) != 2 || number(at(v, "host")) != 0 {
		t.Errorf("holds %v", v)
	}
	if v := post(t.Context(), url+"/holds", doc{"tokens": tokens(1, 40), "salt": "x"}).json(t); number(at(v, "device")) != 0 {
		t.Errorf("holds %v", v)
	}
	quiet(t, e)
	post(t.Context(), url+"/faults", EventFault{Kind: Wrap, Count: 1}).checkOK(t)
	if st := e.Events()[0]; st.Buffered != 1 || !st.Quiet() {
		t.Errorf("state %+v", st)
	}
	post(t.Context(), url+"/faults", EventFault{Kind: Disconnect}).checkOK(t)
	if _, err := s.conn.Next(); err == nil {
		t.Error("still connected")
	}
	for _, bad := range []string{`{"kind":"x"}`, `{"rank":1}`, `{"count":-1}`, `{"x":1}`} {
		if r := post(t.Context(), url+"/faults", bad); r.status != http.StatusBadRequest {
			t.Errorf("%s: status %d", bad, r.status)
		}
	}
	if err := start(t, Config{}).SetEventFault(EventFault{}); err == nil {
		t.Error("a fault of an engine without events")
	}
}

// TestEventsOfTensorRT has the members of that engine only.
func TestEventsOfTensorRT(t *testing.T) {
	e := start(t, withEvents(Config{Flavour: TRTLLM}, EventConfig{}))
	s := follow(t, e, 0, 0)
	e.complete(t, doc{"prompt": tokens(1, 40)})
	if b := s.expect("BlockStored 2 first=true "); b[0].extra != "" {
		t.Errorf("event %+v", b[0])
	}
}

// TestEventsBeforeTheToken has the batch of a prompt sent when its first token arrives.
func TestEventsBeforeTheToken(t *testing.T) {
	for _, f := range []Flavour{VLLM, SGLang} {
		e := start(t, withEvents(Config{Flavour: f}, EventConfig{}))
		for i := range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			post(ctx, e.completionURL(), doc{"prompt": tokens(100*i, 40), "max_tokens": 1}).checkOK(t)
			cancel()
			if st := e.Events()[0]; st.Unpublished > 0 {
				t.Fatalf("%s: %+v", f, st)
			}
		}
	}
}
