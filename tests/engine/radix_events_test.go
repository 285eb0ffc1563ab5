package engine

import (
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher/peer"
)

// TestEventsOfSGLang has the events of a radix tree: late, without copies, and one
// removal for the blocks of a chain.
func TestEventsOfSGLang(t *testing.T) {
	noneLeft(t)
	e := start(t, withEvents(Config{Flavour: SGLang, BlockSize: 4, Blocks: 100, TokenBudget: 40, LoRAs: []string{"a"}}, EventConfig{}))
	quiet(t, e)
	_, replay := e.EventEndpoints(0)
	d, err := peer.Dealer(hostPort(replay))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	got, err := d.Replay(0)
	if err != nil || len(got) != 2 || len(got[0]) != 2 {
		t.Fatalf("replay %q, %v", got, err)
	}
	if events, _ := tellBatch(t, got[0][1]); short(events) != "AllBlocksCleared 0 first=true " {
		t.Errorf("batch 0 is %s", short(events))
	}
	s := follow(t, e, 0, 1)
	// Three chunks of a prefill and then an answer: two events.
	e.complete(t, doc{"prompt": tokens(1, 100), "max_tokens": 10})
	b := s.expect("BlockStored 25 first=true GPU")
	first := b[0].hashes
	if b = s.expect("BlockStored 2 first=false GPU"); b[0].parent != first[24] {
		t.Errorf("event %+v", b[0])
	}
	// The last block is computed again and is no news.
	e.complete(t, doc{"prompt": tokens(1, 100)})
	s.silent()
	if n := e.Events()[0].DeviceBlocks; n != 27 {
		t.Errorf("%d blocks", n)
	}
	// The names leave out the salt, the blocks do not.
	e.complete(t, doc{"prompt": tokens(1, 100), "cache_salt": "s"})
	if b = s.expect("BlockStored 25 first=true GPU"); !slices.Equal(b[0].hashes, first) || b[0].salt != "s" {
		t.Errorf("names %x and %x", b[0].hashes, first)
	}
	e.complete(t, doc{"prompt": tokens(500, 396)})
	b = s.batch() // two chains go, each in the order of the prompt
	if short(b[:2]) != "BlockRemoved 27 first=true GPU; BlockRemoved 24 first=true GPU" || !slices.Equal(b[0].hashes[:25], first) || !slices.Equal(b[1].hashes, first[1:]) {
		t.Errorf("batch %s", short(b))
	}
	if r := post(t.Context(), e.URL()+FlushPath, ""); r.status != 200 {
		t.Errorf("status %d", r.status)
	}
	quiet(t, e)
	for s.next < e.Events()[0].Next { // it publishes when it is idle
		b = s.batch()
	}
	if short(b) != "AllBlocksCleared 0 first=true " || e.Events()[0].DeviceBlocks != 0 {
		t.Errorf("batch %s, state %+v", short(b), e.Events()[0])
	}
	// The names leave out the adapter, too, and no member has it.
	e.complete(t, doc{"prompt": tokens(1, 100), "model": "a"})
	if b = s.expect("BlockStored 25 first=true GPU"); !slices.Equal(b[0].hashes, first) || b[0].lora != "" {
		t.Errorf("names %x and %x, adapter %q", b[0].hashes, first, b[0].lora)
	}
}

// TestSharersMiss has two requests with one prompt at once. An SGLang with events computes
// it twice and keeps one, a vLLM hits what is under way.
func TestSharersMiss(t *testing.T) {
	for flavour, want := range map[Flavour]int{VLLM: 96, SGLang: 0} {
		e := start(t, withEvents(Config{Flavour: flavour, Speed: 1, Step: StepModel{Base: 300}}, EventConfig{}))
		body := doc{"prompt": tokens(1, 100), "max_tokens": 1, "model": "sim-8b"}
		first := make(chan reply)
		go func() { first <- post(t.Context(), e.completionURL(), doc{"prompt": tokens(900, 10), "max_tokens": 1}) }()
		eventually(t, "a step is under way", func() bool { return e.State().Ranks[0].Running == 1 })
		done := make(chan reply, 2)
		for range 2 {
			go func() { done <- post(t.Context(), e.completionURL(), body) }()
		}
		(<-first).checkOK(t)
		hits := cached((<-done).json(t)) + cached((<-done).json(t))
		if hits != want {
			t.Errorf("%s: %d tokens were hit, want %d", flavour, hits, want)
		}
		if n := e.Events()[0].DeviceBlocks; n != 6 {
			t.Errorf("%s: %d blocks", flavour, n)
		}
	}
}

// TestEventsOfSessions has two turns of a session. Events have the blocks of the first
// turn's prompt, which go with all others when there is no room.
func TestEventsOfSessions(t *testing.T) {
	e := start(t, withEvents(Config{Flavour: SGLang, BlockSize: 4, Blocks: 100, StreamingSessions: true}, EventConfig{}))
	quiet(t, e)
	s, l := follow(t, e, 0, 1), newLedger(4)
	e.mustOpen(t, "s")
	for i := range 2 {
		e.say(t.Context(), "s", 1+1000*i, 50, nil).checkOK(t)
	}
	e.closeBy(t, "s").checkOK(t)
	idle(t, e)
	for _, size := range []int{40, 390} {
		e.complete(t, doc{"prompt": tokens(5000+size, size)})
		idle(t, e)
		quiet(t, e)
		for s.next < e.Events()[0].Next {
			l.take(s.batch())
		}
		if n := e.Events()[0].DeviceBlocks; l.wrong != "" || len(l.blocks["GPU"]) != n || n < 20 {
			t.Errorf("%d blocks by the events, %d in the cache; %s", len(l.blocks["GPU"]), n, l.wrong)
		}
	}
}

// TestHostTier evicts a prompt from the device that the host keeps, and uses it again.
func TestHostTier(t *testing.T) {
	e := start(t, withEvents(Config{Flavour: SGLang, BlockSize: 4, Blocks: 30}, EventConfig{HostBlocks: 45}))
	quiet(t, e)
	s := follow(t, e, 0, 1)
	one := doc{"prompt": tokens(1, 81)}
	e.complete(t, one)
	b := s.expect("BlockStored 20 first=true GPU; BlockStored 20 first=true CPU_PINNED")
	names := b[0].hashes
	e.complete(t, doc{"prompt": tokens(500, 81)})
	s.expect("BlockRemoved 11 first=true GPU")
	s.expect("BlockStored 20 first=true GPU; BlockStored 20 first=true CPU_PINNED")
	if device, host := e.Holds(0, ids(tokens(1, 81)), "", ""); device != 9 || host != 11 {
		t.Errorf("%d blocks on the device, %d in the host", device, host)
	}
	if v := e.complete(t, one).json(t); cached(v) != 80 {
		t.Errorf("%d tokens were hit", cached(v))
	}
	b = s.expect("BlockRemoved 11 first=true GPU; BlockStored 11 first=false GPU")
	if b[1].parent != names[8] || !slices.Equal(b[1].hashes, names[9:]) {
		t.Errorf("event %+v", b[1])
	}
	// The host is full: the prompt not used for longer goes, from its end.
	e.complete(t, doc{"prompt": tokens(900, 41)})
	s.expect("BlockRemoved 9 first=true GPU; BlockRemoved 1 first=true GPU")
	s.expect("BlockStored 10 first=true GPU; BlockRemoved 5 first=true CPU_PINNED; BlockStored 10 first=true CPU_PINNED")
	if st := e.Events()[0]; st.HostBlocks != 45 || st.DeviceBlocks != 29 {
		t.Errorf("state %+v", st)
	}
	post(t.Context(), e.URL()+FlushPath, "").checkOK(t)
	s.expect("AllBlocksCleared 0 first=true ")
	if st := e.Events()[0]; st.HostBlocks+st.DeviceBlocks != 0 {
		t.Errorf("state %+v", st)
	}
}
