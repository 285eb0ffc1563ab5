package main

import (
	"bytes"
	"context"
	"errors"
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

// headers is the prefix that the router's response_headers option has.
const headers = "X-Kv-"

// target is a data-parallel rank of a worker.
type target struct {
	Worker uint64
	Rank   int
}

// turn is one request and its result.
type turn struct {
	Case   string
	API    string
	Turn   int // counts from 0
	Begun  time.Time
	At     target
	Before target // that answered the turn before
	// Tokens, as the engine reports them.
	Prompt   int
	Reported int
	// Predicted is the router's.
	Predicted int
	// Expected is what an engine reports that has the turn before and its answer, if
	// the prompt begins with both.
	Expected int
}

// off is predicted minus reported, in tokens.
func (t *turn) off() int { return t.Predicted - t.Reported }

// wrong returns whether the prediction is off by more than some tokens.
func (t *turn) wrong(by int) bool { return max(t.off(), -t.off()) > by }

// client holds conversations before a router.
type client struct {
	url     string // of the router
	clients int    // conversations at the same time
	block   int    // tokens of the engines' KV blocks
	mayFail string // names the case in which requests may fail
	rng     *rand.Rand

	mu     sync.Mutex
	turns  []turn         // that were answered, in the order of their ends
	failed map[string]int // requests without an answer, by case
}

// hold lets each of the conversations take so many turns. If name is not empty, it is
// their case. An error ends all, unless the case may fail.
func (c *client) hold(ctx context.Context, name string, talks []*talk, turns int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan *talk)
	var under sync.WaitGroup
	for range c.clients {
		under.Go(func() {
			for t := range next {
				if name != "" {
					t.name = name
				}
				for range turns {
					if err := c.turn(ctx, t); err != nil {
						c.fail(t, err, cancel)
						break
					}
				}
			}
		})
	}
	for _, i := range c.rng.Perm(len(talks)) {
		select {
		case next <- talks[i]:
		case <-ctx.Done():
		}
	}
	close(next)
	under.Wait()
	return context.Cause(ctx)
}

func (c *client) fail(t *talk, err error, cancel context.CancelCauseFunc) {
	err = fmt.Errorf("%s: conversation %d by %v, turn %d: %w", t.name, t.number, t.api, t.taken, err)
	if t.name != c.mayFail {
		cancel(err)
		return
	}
	fmt.Fprintln(os.Stderr, err)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed == nil {
		c.failed = make(map[string]int)
	}
	c.failed[t.name]++
}

// turn takes the next turn of a conversation, and asks its other questions beside it. If
// it fails, the conversation stays as it was.
func (c *client) turn(ctx context.Context, t *talk) error {
	t.change()
	question := t.question()
	errs := make(chan error, t.branches)
	others := t.branches * min(t.taken, 1)
	for b := range others {
		m := question
		m.text, m.ids = fmt.Sprintf("%d. %s", b+1, m.text), append(newTokens(t.rng, 1), m.ids...)
		go func() {
			_, _, err := c.ask(ctx, t, append(slices.Clip(t.history), m))
			errs <- err
		}()
	}
	history := append(slices.Clip(t.history), question)
	a, result, err := c.ask(ctx, t, history)
	for range others {
		err = errors.Join(err, <-errs)
	}
	if err != nil {
		return err
	}
	t.history = append(history, a.spoken)
	t.tokens, t.held, t.at = a.prompt, a.prompt+a.completion, result.At
	if t.api == tokenIDs && len(a.ids) == 0 { // the engine does not return them
		t.held = a.prompt
	}
	t.taken++
	return nil
}

// ask sends a request, reads the answer and keeps the result.
func (c *client) ask(ctx context.Context, t *talk, history []spoken) (a answer, result turn, err error) {
	result = turn{
		Case: t.name, API: t.api.String(), Turn: t.taken, Begun: time.Now(), Before: t.at,
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+t.api.path(), bytes.NewReader(t.request(history)))
	if err != nil {
		return a, result, err
	}
	req.Header.Set("Content-Type", "application/json")
	if t.session != "" {
		req.Header.Set("X-Session-Id", t.session)
	}
	body, head, err := do(req)
	if err != nil {
		return a, result, err
	}
	if a, err = t.read(body); err != nil {
		return a, result, err
	}
	result.At.Worker, _ = strconv.ParseUint(head.Get(headers+"Worker"), 10, 64)
	result.At.Rank, _ = strconv.Atoi(head.Get(headers + "Dp-Rank"))
	result.Predicted, err = strconv.Atoi(head.Get(headers + "Predicted-Cached-Tokens"))
	if err != nil || a.cached < 0 || a.prompt == 0 || a.text == "" && a.ids == nil {
		return a, result, fmt.Errorf("no prediction, no usage or no text: header %v, body %.500s", head, body)
	}
	result.Prompt, result.Reported = a.prompt, a.cached
	if t.taken > 0 {
		result.Expected = min(t.held-1, a.prompt-1) / c.block * c.block
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.turns = append(c.turns, result)
	return a, result, nil
}

// do returns the body and the header of an answer with status 200.
func do(req *http.Request) ([]byte, http.Header, error) {
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answered %d: %.500s", req.URL, resp.StatusCode, body)
	}
	return body, resp.Header, err
}

// call sends a request without a body.
func call(ctx context.Context, method, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return nil, err
	}
	body, _, err := do(req)
	return body, err
}
