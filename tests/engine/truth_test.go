package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// ledger is what a subscriber knows of a rank from its events alone. It counts how often
// each block is stored in each tier.
type ledger struct {
	size   int
	blocks map[string]map[uint64]int // by medium and name
	next   map[string]uint64         // the name behind a parent, by the block's content
	events int
	wrong  string
}

func newLedger(size int) *ledger {
	l := &ledger{size: size, next: make(map[string]uint64)}
	l.clear()
	return l
}

func (l *ledger) clear() {
	l.blocks = map[string]map[uint64]int{"GPU": {}, "CPU_PINNED": {}}
}

// place is what a block's name depends on: what is before it, and its tokens.
func place(start string, first bool, parent uint64, tokens []uint32) string {
	b := fmt.Appendf(nil, "%s|%t|%d|", start, first, parent)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return string(b)
}

func (l *ledger) take(events []told) {
	for _, e := range events {
		l.events++
		switch e.kind {
		case "AllBlocksCleared":
			l.clear()
		case "BlockRemoved":
			for _, h := range e.hashes {
				tier := l.blocks[e.medium]
				if tier[h]--; tier[h] == 0 {
					delete(tier, h)
				} else if tier[h] < 0 {
					l.wrong = fmt.Sprintf("%x was removed more often than stored", h)
				}
			}
		case "BlockStored":
			l.store(e)
		}
	}
}

func (l *ledger) store(e told) {
	if len(e.tokens) != l.size*len(e.hashes) {
		l.wrong = fmt.Sprintf("%d tokens for %d blocks", len(e.tokens), len(e.hashes))
		return
	}
	if !e.first && l.blocks["GPU"][e.parent] == 0 && l.blocks["CPU_PINNED"][e.parent] == 0 {
		l.wrong = fmt.Sprintf("parent %x is not there", e.parent)
	}
	start, first, parent := e.lora+firstKeys(e.extra), e.first, e.parent
	for i, h := range e.hashes {
		if !first {
			start = ""
		}
		at := place(start, first, parent, e.tokens[i*l.size:(i+1)*l.size])
		if known, ok := l.next[at]; ok && known != h {
			l.wrong = fmt.Sprintf("one block is named %x and %x", known, h)
		}
		l.next[at] = h
		l.blocks[e.medium][h]++
		first, parent = false, h
	}
}

// holds is what Engine.Holds returns, from the events alone.
func (l *ledger) holds(start string, tokens []uint32) (device, host int) {
	first, parent := true, uint64(0)
	onDevice := true
	for len(tokens) >= l.size {
		h, known := l.next[place(start, first, parent, tokens[:l.size])]
		if !known {
			break
		}
		onDevice = onDevice && l.blocks["GPU"][h] > 0
		switch {
		case onDevice:
			device++
		case l.blocks["CPU_PINNED"][h] > 0:
			host++
		default:
			return device, host
		}
		first, parent, start, tokens = false, h, "", tokens[l.size:]
	}
	return device, host
}

// firstKeys returns the extra keys of the first block: those in the first brackets.
func firstKeys(printed string) string {
	if len(printed) < 2 || printed[1] != '[' {
		return ""
	}
	for i, c := range printed {
		if c == ']' {
			return printed[1 : i+1]
		}
	}
	return ""
}

// randomLoad sends requests of prompts that share beginnings, some of which are aborted,
// and clears the caches now and then. It returns all prompts with their answers.
func randomLoad(t *testing.T, e *Engine, requests int, salts []string) map[string][][]uint32 {
	t.Helper()
	var mu sync.Mutex
	sent := make(map[string][][]uint32)
	var all sync.WaitGroup
	for worker := range 6 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(7, uint64(worker)))
			for i := range requests / 6 {
				prompt := make([]int, 20+rng.IntN(800))
				for at, branch := 0, 0; at < len(prompt); at++ {
					if at%64 == 0 {
						branch = branch*3 + rng.IntN(3) + 1
					}
					prompt[at] = branch*1000 + at
				}
				salt := salts[rng.IntN(len(salts))]
				body := doc{"prompt": prompt, "max_tokens": 1 + rng.IntN(40), "ignore_eos": true, "return_token_ids": true}
				if salt != "" {
					body["cache_salt"] = salt
				}
				ctx, cancel := context.WithCancel(t.Context())
				if rng.IntN(10) == 0 {
					ctx, cancel = context.WithTimeout(t.Context(), time.Duration(rng.IntN(3000))*time.Microsecond)
				}
				r := post(ctx, e.completionURL(), body)
				cancel()
				full := ids(prompt)
				if r.status == 200 && r.err == nil {
					list, _ := at(r.json(t), "choices", 0, "token_ids").([]any)
					for _, n := range list {
						full = append(full, uint32(number(n)))
					}
				}
				mu.Lock()
				sent[salt] = append(sent[salt], full)
				mu.Unlock()
				if i%100 == 50 {
					e.life.clear()
				}
			}
		})
	}
	all.Wait()
	idle(t, e)
	return sent
}

// TestTruth follows a rank under random load with evictions, aborts and clears. What a
// subscriber knows from the events is what the cache holds, block by block.
func TestTruth(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg      Config
		requests int
		salts    []string
	}{
		"vllm":    {withEvents(Config{}, EventConfig{}), eventLoad, []string{"", "", "s"}},
		"private": {withEvents(Config{}, EventConfig{HashSeed: 99}), eventLoad / 3, []string{""}},
		"sglang":  {withEvents(Config{Flavour: SGLang}, EventConfig{HashSeed: 1}), eventLoad / 3, []string{""}},
		"host":    {withEvents(Config{Flavour: SGLang}, EventConfig{HostBlocks: 1500}), eventLoad / 3, []string{""}},
	} {
		t.Run(name, func(t *testing.T) {
			noneLeft(t)
			tc.cfg.BlockSize, tc.cfg.Blocks, tc.cfg.MaxModelLen = 4, 1000, 2000
			tc.cfg.Step = StepModel{Base: 0.1}
			e := start(t, tc.cfg)
			next := uint64(0)
			if tc.cfg.Flavour == SGLang {
				quiet(t, e)
				next = 1
			}
			s, l := follow(t, e, 0, next), newLedger(4)
			ended := make(chan uint64)
			followed := make(chan struct{})
			go func() {
				defer close(followed)
				l.follow(s, ended)
			}()
			sent := randomLoad(t, e, tc.requests, tc.salts)
			e.complete(t, doc{"prompt": tokens(1, 20)}) // a vLLM's clear may wait for a step
			idle(t, e)
			quiet(t, e)
			ended <- e.Events()[0].Next
			<-followed
			compare(t, e, l, sent)
		})
	}
}

// follow takes batches until it has all before the number that comes from ended.
func (l *ledger) follow(s *subscriber, ended <-chan uint64) {
	last := ^uint64(0)
	for s.next < last {
		select {
		case last = <-ended:
			continue
		default:
		}
		f, err := s.conn.Frames(500 * time.Millisecond)
		if err != nil {
			continue
		}
		if n := binary.BigEndian.Uint64(f[1]); n != s.next {
			l.wrong = fmt.Sprintf("number %d, want %d", n, s.next)
		}
		s.next++
		events, _ := tellBatch(s.t, f[2])
		l.take(events)
	}
}

// compare checks each prompt that was sent, and the number of blocks.
func compare(t *testing.T, e *Engine, l *ledger, sent map[string][][]uint32) {
	t.Helper()
	if l.wrong != "" {
		t.Fatal(l.wrong)
	}
	state := e.Events()[0]
	if len(l.blocks["GPU"]) != state.DeviceBlocks || len(l.blocks["CPU_PINNED"]) != state.HostBlocks {
		t.Errorf("%d and %d blocks, the cache has %d and %d", len(l.blocks["GPU"]), len(l.blocks["CPU_PINNED"]), state.DeviceBlocks, state.HostBlocks)
	}
	held, inHost, prompts := 0, 0, 0
	for salt, list := range sent {
		start := ""
		if salt != "" {
			start = "[" + salt + "]"
		}
		for _, tokens := range list {
			prompts++
			device, host := e.Holds(0, tokens, "", salt)
			if d, h := l.holds(start, tokens); d != device || h != host {
				t.Fatalf("prompt of %d tokens: %d and %d blocks by the events, %d and %d in the cache", len(tokens), d, h, device, host)
			}
			held, inHost = held+device, inHost+host
		}
	}
	if held == 0 || e.cfg.Events.HostBlocks > 0 && inHost == 0 {
		t.Errorf("%d blocks are held on the device, %d in the host", held, inHost)
	}
	t.Logf("%d events in %d batches, %d prompts, %d blocks held and %d in the host", l.events, state.Next, prompts, held, inHost)
}
