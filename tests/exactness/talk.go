// Package exactness compares what a router predicts for conversations of token ids with the
// cached tokens that the engines report. It also reads what the router says of the engines' KV
// events. It starts no router and no engine.
package exactness

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Directive is what kv_router's block needs.
const Directive = "response_headers X-Kv-"

// Talk is a conversation of token ids. Each prompt is the one before, the tokens that the
// engine generated, and new ones.
type Talk struct {
	number      int
	model, salt string
	ids         []uint32
	turns       int
	at          Target // that answered the last turn
}

// Target is a data-parallel rank of a worker.
type Target struct {
	Worker uint64 `json:"worker"`
	Rank   int    `json:"rank"`
}

// Sample is one request and its result.
type Sample struct {
	Phase     string    `json:"phase"`
	Talk      int       `json:"talk"`
	Turn      int       `json:"turn"`
	Model     string    `json:"model"`
	Salt      string    `json:"salt,omitempty"`
	Begun     time.Time `json:"begun"`
	At        Target    `json:"at"`
	Before    Target    `json:"before"` // that answered the turn before; the zero value: none did
	Reason    string    `json:"reason"`
	Prompt    int       `json:"prompt"` // tokens, as are the next two
	Predicted int       `json:"predicted"`
	Reported  int       `json:"reported"`
}

// Off is predicted minus reported, in tokens.
func (s *Sample) Off() int { return s.Predicted - s.Reported }

// Load are conversations before a router. Set the exported fields, except the last two.
type Load struct {
	Router  string // address
	Model   string
	Adapter string // a model's name; empty: no conversation has an adapter
	Salts   bool   // some conversations have a salt
	Clients int    // turns at the same time
	Rand    *rand.Rand
	NoIDs   bool // the engines do not return the tokens that they generate
	// MayFail names the phase in which requests may fail.
	MayFail string

	// Talks are all conversations that were opened.
	Talks []*Talk
	// Samples are the requests that were answered, in the order of their ends.
	Samples []Sample

	mu     sync.Mutex
	failed map[string]int // requests without an answer, by phase
}

// Open adds conversations. Each four begin with the same tokens. One of them may have a salt,
// one an adapter.
func (l *Load) Open(n int) []*Talk {
	list := make([]*Talk, 0, n)
	var head []uint32
	for i := range n {
		if i%4 == 0 {
			head = l.tokens(200 + l.Rand.IntN(200))
		}
		t := &Talk{number: len(l.Talks), model: l.Model, ids: slices.Clip(head)}
		switch {
		case i%4 == 1 && l.Salts:
			t.salt = "tenant-" + strconv.Itoa(i)
		case i%4 == 2 && l.Adapter != "":
			t.model = l.Adapter
		}
		l.Talks, list = append(l.Talks, t), append(list, t)
	}
	return list
}

// Shorter returns those of some conversations that have fewer tokens.
func Shorter(talks []*Talk, tokens int) []*Talk {
	var list []*Talk
	for _, t := range talks {
		if len(t.ids) < tokens {
			list = append(list, t)
		}
	}
	return list
}

// tokens returns n random token ids that are no special tokens.
func (l *Load) tokens(n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = uint32(10 + l.Rand.IntN(2000)) //nolint:gosec // small
	}
	return ids
}

// Hold lets each of the conversations take a number of turns, in a random order.
func (l *Load) Hold(ctx context.Context, phase string, talks []*Talk, turns int) error {
	for range turns {
		type job struct {
			t      *Talk
			answer int
			more   []uint32
		}
		jobs := make(chan job)
		var under sync.WaitGroup
		var first error
		for range l.Clients {
			under.Go(func() {
				for j := range jobs {
					if err := l.turn(ctx, phase, j.t, j.more, j.answer); err != nil {
						l.mu.Lock()
						fmt.Fprintf(os.Stderr, "%s: conversation %d, turn %d: %v\n", phase, j.t.number, j.t.turns, err)
						if l.failed == nil {
							l.failed = make(map[string]int)
						}
						l.failed[phase]++
						first = err
						l.mu.Unlock()
					}
				}
			})
		}
		for _, i := range l.Rand.Perm(len(talks)) {
			jobs <- job{talks[i], 10 + l.Rand.IntN(70), l.tokens(50 + l.Rand.IntN(350))}
		}
		close(jobs)
		under.Wait()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if first != nil && phase != l.MayFail {
			return fmt.Errorf("%s: %w", phase, first)
		}
	}
	return nil
}

// answered is a whole answer of the completions API, or one event of it.
type answered struct {
	Choices []struct {
		TokenIDs []uint32 `json:"token_ids"`
	} `json:"choices"`
	Usage *struct {
		Prompt  int `json:"prompt_tokens"`
		Details *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

// turn takes the next turn of a conversation. If it fails, the conversation stays as it was.
func (l *Load) turn(ctx context.Context, phase string, t *Talk, more []uint32, answer int) error {
	prompt := slices.Concat(t.ids, more)
	streams := t.turns%2 == 1
	v := map[string]any{
		"model": t.model, "prompt": prompt, "max_tokens": answer, "stream": streams,
		"return_token_ids": true, "ignore_eos": true,
	}
	if streams {
		v["stream_options"] = map[string]any{"include_usage": true}
	}
	if t.salt != "" {
		v["cache_salt"] = t.salt
	}
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	s := Sample{Phase: phase, Talk: t.number, Turn: t.turns, Model: t.model, Salt: t.salt, Begun: time.Now(), Before: t.at}
	generated, err := l.send(ctx, body, streams, &s)
	if err != nil {
		return err
	}
	t.ids, t.at = append(prompt, generated...), s.At
	t.turns++
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Samples = append(l.Samples, s)
	return nil
}

// send sends a request and fills in the sample. It returns the generated tokens.
func (l *Load) send(ctx context.Context, body []byte, streams bool, s *Sample) (generated []uint32, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+l.Router+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("reading answer: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("router answered %d: %.300s", resp.StatusCode, got)
	}
	s.At.Worker, _ = strconv.ParseUint(resp.Header.Get("X-Kv-Worker"), 10, 64)
	s.At.Rank, _ = strconv.Atoi(resp.Header.Get("X-Kv-Dp-Rank"))
	s.Reason = resp.Header.Get("X-Kv-Reason")
	s.Predicted, err = strconv.Atoi(resp.Header.Get("X-Kv-Predicted-Cached-Tokens"))
	if err != nil {
		return nil, fmt.Errorf("no prediction: header %v", resp.Header)
	}
	s.Reported = -1
	for line := range bytes.Lines(got) {
		if streams {
			var ok bool
			if line, ok = bytes.CutPrefix(bytes.TrimSpace(line), []byte("data: ")); !ok || string(line) == "[DONE]" {
				continue
			}
		}
		var a answered
		if err := json.Unmarshal(line, &a); err != nil {
			return nil, fmt.Errorf("reading answer %.200s: %w", line, err)
		}
		for _, c := range a.Choices {
			generated = append(generated, c.TokenIDs...)
		}
		if a.Usage != nil && a.Usage.Details != nil {
			s.Prompt, s.Reported = a.Usage.Prompt, a.Usage.Details.Cached
		}
	}
	if s.Reported < 0 || len(generated) == 0 && !l.NoIDs {
		return nil, fmt.Errorf("no usage or no tokens in the answer: %.300s", got)
	}
	return generated, nil
}
