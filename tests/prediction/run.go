package prediction

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
)

// headerPrefix is what response_headers has to be set to.
const headerPrefix = "X-Kv-"

// Directive is what kv_router's block needs for a Run.
const Directive = "response_headers " + headerPrefix

// Run is clients before a router.
type Run struct {
	URL      string // of the router, without a slash at the end
	Engine   string // base URL of an engine, which tokenizes for clients with token ids
	Model    string
	Clients  int // at the same time
	Block    int // tokens of the engines' KV blocks
	Progress func(done int)
}

// Turn is one request and its answer.
type Turn struct {
	Case   string `json:"case"`
	API    string `json:"api"`
	Stream bool   `json:"stream"`
	// Conversation and Turn count from 0.
	Conversation int `json:"conversation"`
	Turn         int `json:"turn"`
	Bytes        int `json:"bytes"` // of the request's body
	// Tokens, as the engine says.
	Prompt     int `json:"prompt"`
	Completion int `json:"completion"`
	Reported   int `json:"reported"`
	// Predicted is the router's.
	Predicted int `json:"predicted"`
	// Expected is what an engine reports that has the turn before and its answer,
	// if the prompt begins with both; -1 for first turns.
	Expected int    `json:"expected"`
	Worker   string `json:"worker"`
	// Moved says that another worker answered the turn before.
	Moved bool `json:"moved"`
}

// Converse holds conversations and returns all turns.
func (r *Run) Converse(ctx context.Context, plans []Plan) ([]Turn, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu   sync.Mutex
		all  []Turn
		wg   sync.WaitGroup
		next = make(chan int)
	)
	for range r.Clients {
		wg.Go(func() {
			for i := range next {
				turns, err := r.converse(ctx, &plans[i], i)
				if err != nil {
					cancel(fmt.Errorf("conversation %d by %v, turn %d: %w", i, plans[i].API, len(turns), err))
				}
				mu.Lock()
				all = append(all, turns...)
				n := len(all)
				mu.Unlock()
				if r.Progress != nil {
					r.Progress(n)
				}
			}
		})
	}
	for i := range plans {
		select {
		case next <- i:
		case <-ctx.Done():
		}
	}
	close(next)
	wg.Wait()
	return all, context.Cause(ctx)
}

func (r *Run) converse(ctx context.Context, p *Plan, number int) (turns []Turn, err error) {
	var history []spoken
	held := -1 // tokens of the turn before and its answer
	for i, question := range p.Turns {
		if i > 1 {
			history = p.edit(history, i)
		}
		asked, err := r.asks(ctx, p, history, question)
		if err != nil {
			return turns, err
		}
		branches := make(chan branch, p.Branches)
		for b := range p.Branches * min(i, 1) {
			go func() {
				asked, err := r.asks(ctx, p, history, fmt.Sprintf("%d. %s", b+1, question))
				if err == nil {
					_, asked.turn, err = r.ask(ctx, p, asked.history)
				}
				branches <- branch{asked.turn, err}
			}()
		}
		a, t, err := r.ask(ctx, p, asked.history)
		if err != nil {
			return turns, err
		}
		at := func(t Turn) Turn {
			t.Conversation, t.Turn, t.Expected = number, i, -1
			if i > 0 {
				t.Expected = min(held-1, t.Prompt-1) / r.Block * r.Block
				t.Moved = t.Worker != turns[len(turns)-1].Worker
			}
			return t
		}
		var more []Turn
		for range p.Branches * min(i, 1) {
			b := <-branches
			if err = b.err; err != nil {
				return turns, err
			}
			more = append(more, at(b.turn))
		}
		turns = append(append(turns, more...), at(t))
		held = a.prompt + a.completion
		history = append(asked.history, a.spoken)
	}
	return turns, nil
}

type branch struct {
	turn Turn
	err  error
}

// asked is a history with a question at its end.
type asked struct {
	history []spoken
	turn    Turn
}

// asks adds a question to a copy of a history.
func (r *Run) asks(ctx context.Context, p *Plan, history []spoken, question string) (asked, error) {
	m := spoken{role: "user", text: question}
	if p.API == IDs {
		text := piece(m)
		if len(history) == 0 {
			text = p.System + text
		}
		var err error
		if m.ids, err = r.tokenize(ctx, text); err != nil {
			return asked{}, err
		}
	}
	return asked{history: append(slices.Clone(history), m)}, nil
}

// edit changes the history before turn i, as its plan says. The oldest message
// stays where it has the system prompt in it.
func (p *Plan) edit(history []spoken, i int) []spoken {
	switch {
	case p.Edit == Change && i%2 == 0:
		history = slices.Clone(history)
		m := &history[len(history)/2]
		m.text = "(shortened) " + m.text[len(m.text)/2:]
		for len(m.text) > 12 && m.text[12]&0xc0 == 0x80 { // not within a character
			m.text = m.text[:12] + m.text[13:]
		}
		m.ids, m.item = m.ids[len(m.ids)/2:], nil
	case p.Edit == Drop && i > 2 && p.API != IDs:
		history = slices.Clone(history[2:])
	}
	return history
}

// ask sends a request and reads the answer.
func (r *Run) ask(ctx context.Context, p *Plan, history []spoken) (a answer, t Turn, err error) {
	body := p.request(r.Model, history)
	header := http.Header{"Content-Type": {"application/json"}}
	if p.Session != "" {
		header.Set("X-Session-Id", p.Session)
	}
	got, head, err := post(ctx, r.URL+p.API.path(), body, header)
	if err != nil {
		return a, t, err
	}
	if a, err = p.read(got); err != nil {
		return a, t, err
	}
	predicted, err := strconv.Atoi(head.Get(headerPrefix + "Predicted-Cached-Tokens"))
	if err != nil || a.cached < 0 || a.prompt == 0 || a.text == "" {
		return a, t, fmt.Errorf("no prediction, no usage or no text: header %v, body %.500s", head, got)
	}
	return a, Turn{
		Case: p.Case, API: p.API.String(), Stream: p.Stream, Bytes: len(body), Worker: head.Get(headerPrefix + "Worker"),
		Prompt: a.prompt, Completion: a.completion, Reported: a.cached, Predicted: predicted,
	}, nil
}

// tokenize asks an engine for the tokens of a text.
func (r *Run) tokenize(ctx context.Context, text string) ([]uint32, error) {
	body, _ := json.Marshal(object{"model": r.Model, "prompt": text, "add_special_tokens": false})
	got, _, err := post(ctx, r.Engine+"/tokenize", body, http.Header{"Content-Type": {"application/json"}})
	if err != nil {
		return nil, err
	}
	var v struct {
		Tokens []uint32 `json:"tokens"`
	}
	err = json.Unmarshal(got, &v)
	return v.Tokens, err
}

func post(ctx context.Context, url string, body []byte, header http.Header) ([]byte, http.Header, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	req.Header = header
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, nil, fmt.Errorf("reading answer of %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, nil, fmt.Errorf("%s answered %d: %.500s", url, resp.StatusCode, got)
	}
	return got, resp.Header, nil
}
