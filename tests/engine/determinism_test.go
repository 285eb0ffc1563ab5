package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// history runs a load against an engine in a time of its own, in which only
// waiting takes time. Arrivals are random; some clients leave, and there is a
// fault and a restart. It returns the journal and the bytes of all answers.
func history(t *testing.T, cfg Config, seed uint64) (out []Record, answers []string, last State) {
	synctest.Test(t, func(t *testing.T) {
		e, err := newEngine(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.boot(); err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(seed, 0))
		var clients sync.WaitGroup
		const requests = 300
		answers = make([]string, requests)
		for i := range requests {
			time.Sleep(time.Duration(rng.IntN(50_000_000))) // in the time of the test
			ctx, leave := context.WithCancel(t.Context())
			if rng.IntN(8) == 0 {
				time.AfterFunc(time.Duration(rng.IntN(500_000_000)), leave)
			}
			prompt := slices.Concat(tokens(1000*rng.IntN(8), 200+100*rng.IntN(4)), tokens(100_000*i, rng.IntN(100)))
			body, _ := json.Marshal(doc{"prompt": prompt, "max_tokens": 1 + rng.IntN(60), "stream": rng.IntN(2) == 0, "ignore_eos": true})
			req := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/completions", bytes.NewReader(body))
			clients.Go(func() {
				defer leave()
				w := httptest.NewRecorder()
				e.ServeHTTP(w, req)
				answers[i] = w.Body.String()
			})
			synctest.Wait() // the request has come in
			switch i {
			case 100:
				if err := e.SetFault(Fault{Kind: Slow, Factor: 3, Count: 5}); err != nil {
					t.Error(err)
				}
			case 200:
				e.Kill()
				if err := e.boot(); err != nil {
					t.Error(err)
				}
			}
		}
		clients.Wait()
		last = e.State()
		e.Close()
		out = e.Journal()
	})
	return out, answers, last
}

// TestOneSeedOneJournal runs one load twice. All that the engine notes is equal,
// including the times, and the answers are equal, too.
func TestOneSeedOneJournal(t *testing.T) {
	cfg := Config{Ranks: 2, Blocks: 300, MaxRunning: 6, TokenBudget: 256, Speed: 1}
	a, said, state := history(t, cfg, 1)
	b, again, _ := history(t, cfg, 1)
	count := map[Outcome]int{}
	hits, waited := 0, 0
	for i := range a {
		if !reflect.DeepEqual(a[i], b[i]) {
			t.Fatalf("record %d is\n%+v\nthen\n%+v", i, a[i], b[i])
		}
		count[a[i].Outcome]++
		hits += max(0, a[i].CachedTokens)
		if a[i].AdmittedMS > a[i].AtMS+50 {
			waited++
		}
	}
	if !slices.Equal(said, again) {
		t.Error("the answers differ")
	}
	if len(a) != 300 || count[Finished] < 200 || count[Aborted] == 0 || count[Broken] == 0 || hits == 0 || waited == 0 {
		t.Errorf("%d records, %v, %d tokens hit, %d waited: too little was tried", len(a), count, hits, waited)
	}
	for _, r := range state.Ranks {
		if r.Running+r.Waiting+r.UsedBlocks != 0 || r.LagMS > 1 {
			t.Errorf("at the end %+v", r)
		}
	}
	c, _, _ := history(t, cfg, 2)
	if reflect.DeepEqual(a, c) {
		t.Error("another seed has the same journal")
	}
}
