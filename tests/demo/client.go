package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
)

const (
	// attempts is how often a turn is asked before its session is given up.
	attempts = 4
	// pause is the time between them, in the engines' time.
	pause = 500 * time.Millisecond
	// requestHeader has the number of a request, by which it is found in the
	// engines' journals.
	requestHeader = "X-Demo-Request"
)

// player plays the workload of a run. Its times are the engines'.
type player struct {
	*run
	http  http.Client
	zero  time.Time // the run's beginning
	speed float64
}

func newPlayer(r *run, speed float64) *player {
	return &player{run: r, speed: speed, http: http.Client{
		Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true},
	}}
}

// since returns how much of the engines' time has passed between two moments.
func (p *player) since(from, to time.Time) time.Duration {
	return time.Duration(float64(to.Sub(from)) * p.speed)
}

// wait waits for so long of the engines' time after a moment. It returns false if
// ctx ended meanwhile.
func (p *player) wait(ctx context.Context, from time.Time, d time.Duration) bool {
	timer := time.NewTimer(time.Until(from.Add(time.Duration(float64(d) / p.speed))))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// dialogue is a session as far as it has come. Its messages grow as JSON.
type dialogue struct {
	*session
	messages []byte
	asked    int // of the turns
}

// converse plays one session.
func (p *player) converse(ctx context.Context, c *session) {
	d := &dialogue{session: c}
	for ok := p.wait(ctx, p.zero, c.begins); ok && d.asked < len(c.turns); {
		ok = p.wait(ctx, time.Now(), c.turns[d.asked].think) && p.goOn(ctx, d)
	}
}

// converseInTurn plays all sessions, each with one question in a round.
func (p *player) converseInTurn(ctx context.Context) {
	var all []*dialogue
	for _, c := range p.load.sessions {
		all = append(all, &dialogue{session: c})
	}
	for len(all) > 0 {
		all = slices.DeleteFunc(all, func(d *dialogue) bool { return !p.goOn(ctx, d) || d.asked == len(d.turns) })
	}
}

// goOn asks the next question, and returns whether there was an answer.
func (p *player) goOn(ctx context.Context, d *dialogue) bool {
	t := d.turns[d.asked]
	question := t.question
	if d.asked == 0 {
		question = d.document + `\n\n` + question
	}
	if d.asked == 0 || p.load.alone {
		d.messages = fmt.Appendf(nil, `{"role":"system","content":"%s"}`, p.load.prompt)
	}
	d.asked++
	d.messages = fmt.Appendf(d.messages, `,{"role":"user","content":"%s"}`, question)
	a := p.turn(ctx, d.session, d.messages, t.answer)
	if a == nil {
		return false
	}
	d.messages = fmt.Appendf(d.messages, `,{"role":"assistant","content":"%s"}`, a.text)
	return true
}

// turn asks until there is a whole answer, and returns it, or nil if there is none.
// Its times count from the first attempt.
func (p *player) turn(ctx context.Context, c *session, messages []byte, tokens int) *answer {
	body := fmt.Appendf(nil, `{"model":"%s","stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,"max_tokens":%d,"messages":[%s]}`,
		p.model, tokens, messages)
	var asked time.Time
	for i := range attempts {
		if i > 0 && !p.wait(ctx, time.Now(), pause) {
			return nil
		}
		a := p.ask(ctx, c, body)
		if ctx.Err() != nil {
			return nil
		}
		if asked.IsZero() {
			asked = a.sent
		}
		p.count(a, p.since(p.zero, a.end))
		if a.err == nil {
			p.add(sample{
				at: p.since(p.zero, asked), ttft: p.since(asked, a.first),
				own: p.since(a.sent, a.first), end: p.since(p.zero, a.end), prompt: a.prompt, cached: a.cached,
			})
			return a
		}
	}
	return nil
}

// answer is the result of one request.
type answer struct {
	number           int
	sent, first, end time.Time
	err              error
	text             []byte // as it stands in JSON
	prompt, cached   int    // tokens, as the engine counts
}

// ask makes one request. Its time begins when the client sends it.
func (p *player) ask(ctx context.Context, c *session, body []byte) *answer {
	a := &answer{number: p.next(), sent: time.Now()}
	a.err = p.read(ctx, c, body, a)
	a.end = time.Now()
	return a
}

func (p *player) read(ctx context.Context, c *session, body []byte, a *answer) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.addrs[a.number%len(p.addrs)]+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(requestHeader, strconv.Itoa(a.number))
	if p.ids {
		req.Header.Set(sessionHeader, strconv.Itoa(c.id))
	}
	resp, err := p.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300)) //nolint:errcheck // it is for the message
		return fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	return a.stream(resp.Body)
}

// stream reads a stream to its end.
func (a *answer) stream(body io.Reader) error {
	in := bufio.NewReader(body)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return fmt.Errorf("reading the stream: %w", err)
		}
		event, found := bytes.CutPrefix(line, []byte("data:"))
		if !found {
			continue
		}
		if bytes.HasPrefix(bytes.TrimSpace(event), []byte("[DONE]")) {
			break
		}
		// As it stands there, between its quotes: it goes into the next question.
		if text := gjson.GetBytes(event, "choices.0.delta.content"); text.Str != "" {
			if a.first.IsZero() {
				a.first = time.Now()
			}
			a.text = append(a.text, text.Raw[1:len(text.Raw)-1]...)
		}
		if u := gjson.GetBytes(event, "usage"); u.IsObject() {
			a.prompt, a.cached = int(u.Get("prompt_tokens").Int()), int(u.Get("prompt_tokens_details.cached_tokens").Int())
		}
	}
	if a.first.IsZero() || a.prompt == 0 {
		return errors.New("the stream has no text or no usage")
	}
	return nil
}
