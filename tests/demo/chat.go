package main

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/openai/openai-go"
	"github.com/openai/openai-go/option"
)

const (
	// attempts is how often a turn is asked before its conversation is given up.
	attempts = 4
	// pause is the time between them, in the engines' time.
	pause = 500 * time.Millisecond
	// conversationHeader says which conversation a request belongs to.
	conversationHeader = "X-Conversation"
)

// player holds conversations. Its times are the engines'.
type player struct {
	client openai.Client
	system string
	zero   time.Time // the run's beginning
	speed  float64
	tally  *tally
	tells  bool // requests have a conversationHeader
}

func newPlayer(url, system string, speed float64, t *tally) *player {
	return &player{
		client: openai.NewClient(
			option.WithBaseURL(url+"/"), option.WithAPIKey("none"),
			// The client would ask again by itself, and hide failures.
			option.WithMaxRetries(0),
			option.WithHTTPClient(&http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}),
		),
		system: system, zero: time.Now(), speed: speed, tally: t,
	}
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

// converse holds one conversation.
func (p *player) converse(ctx context.Context, c *conversation) {
	if !p.wait(ctx, p.zero, c.begins) {
		return
	}
	messages := []openai.ChatCompletionMessageParamUnion{openai.SystemMessage(p.system)}
	held := int64(0)
	defer func() { p.tally.hold(c.document, held, 0) }()
	var opts []option.RequestOption
	if p.tells {
		opts = append(opts, option.WithHeader(conversationHeader, strconv.Itoa(c.id)))
	}
	for i, t := range c.turns {
		if !p.wait(ctx, time.Now(), t.think) {
			return
		}
		messages = append(messages, openai.UserMessage(c.question(i)))
		a := p.turn(ctx, messages, t.answer, opts)
		if a == nil {
			return
		}
		messages = append(messages, openai.AssistantMessage(a.text.String()))
		p.tally.hold(c.document, held, a.prompt)
		held = a.prompt
	}
}

// turn asks until there is a whole answer, and returns it, or nil when there will
// be none. What the turn took counts from when it was asked first.
func (p *player) turn(ctx context.Context, messages []openai.ChatCompletionMessageParamUnion, tokens int, opts []option.RequestOption) *answer {
	var asked time.Time
	for i := range attempts {
		if i > 0 && !p.wait(ctx, time.Now(), pause) {
			return nil
		}
		a := p.ask(ctx, messages, tokens, opts)
		if ctx.Err() != nil {
			return nil
		}
		if asked.IsZero() {
			asked = a.sent
		}
		p.tally.count(a)
		if a.whole {
			p.tally.add(sample{
				at: p.since(p.zero, asked), ttft: p.since(asked, a.first), total: p.since(asked, a.end),
				prompt: a.prompt, cached: a.cached,
			}, p.since(a.sent, a.first))
			return a
		}
	}
	p.tally.giveUp()
	return nil
}

// answer is what came of one request.
type answer struct {
	sent, first, end time.Time
	began            bool // its header came, with status 200
	whole            bool // it ended as it should
	text             strings.Builder
	prompt, cached   int64 // tokens, as the engine says
}

// ask makes one request. Its time begins when the client sends it.
func (p *player) ask(ctx context.Context, messages []openai.ChatCompletionMessageParamUnion, tokens int, opts []option.RequestOption) *answer {
	a := &answer{sent: time.Now()}
	events := p.client.Chat.Completions.NewStreaming(ctx, openai.ChatCompletionNewParams{
		Model: model, Messages: messages, MaxCompletionTokens: openai.Int(int64(tokens)),
		StreamOptions: openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)},
	}, append([]option.RequestOption{option.WithMiddleware(func(r *http.Request, next option.MiddlewareNext) (*http.Response, error) {
		a.sent = time.Now()
		resp, err := next(r)
		a.began = err == nil && resp.StatusCode == http.StatusOK
		return resp, err
	})}, opts...)...)
	defer events.Close()
	finished := false
	for events.Next() {
		chunk := events.Current()
		for _, c := range chunk.Choices {
			if c.Delta.Content != "" && a.first.IsZero() {
				a.first = time.Now()
			}
			a.text.WriteString(c.Delta.Content)
			finished = finished || c.FinishReason != ""
		}
		if u := chunk.Usage; u.PromptTokens > 0 {
			a.prompt, a.cached = u.PromptTokens, u.PromptTokensDetails.CachedTokens
		}
	}
	a.end = time.Now()
	a.whole = events.Err() == nil && finished && a.prompt > 0 && !a.first.IsZero()
	return a
}
