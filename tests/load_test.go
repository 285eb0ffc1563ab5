package tests

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// fate is the end of a request as its client sees it.
type fate int

const (
	served  fate = iota // 200 and the whole answer
	failed              // another status, no header, or the engine's own error or abort
	broken              // 200, and then the router's error event or an abort
	strange             // 200, and it ended well, but it is no answer
	left                // the client left before
	fates
)

func (f fate) String() string {
	return [...]string{"served", "failed", "broken", "strange", "left"}[f]
}

// visit is one request of a load.
type visit struct {
	client              int
	session             string
	turn                int // of its conversation, from 0
	begun, first, ended time.Time
	fate                fate
	status              int
	engine              string
	header              http.Header
	body                []byte // of what failed
	err                 error
}

// wait returns the time to the first token, or to the end if there was none.
func (v *visit) wait() time.Duration {
	if v.first.IsZero() {
		return v.ended.Sub(v.begun)
	}
	return v.first.Sub(v.begun)
}

// load is clients that hold streamed conversations of several turns, one after the other.
// Clients with an even number send a session key for each conversation.
type load struct {
	s *server
	// patience returns for how long the client stays with its nth request, 0
	// for as long as it takes. Default: as long as it takes.
	patience func(client, n int) time.Duration
	// slow returns whether the client reads its answers a little at a time.
	// Default: none does.
	slow func(client int) bool
	// turns are those of a conversation. Default: 6.
	turns int
	// resends is how often a request is sent again whose connection Caddy has
	// dropped, as it does when it closes a listener. Default: 0.
	resends int

	ctx    context.Context // when it ends, no request is begun
	end    context.CancelFunc
	abort  context.CancelFunc // ends those that run
	run    context.Context
	wg     sync.WaitGroup
	mu     sync.Mutex
	visits []visit
	resent int
}

// start starts n clients.
func (l *load) start(ctx context.Context, n int) {
	l.run, l.abort = context.WithCancel(ctx)
	l.ctx, l.end = context.WithCancel(l.run)
	for i := range n {
		l.wg.Go(func() { l.client(i) })
	}
}

// stop lets the clients finish their requests, and cancels them when that takes too long. It returns
// whether they finished by themselves.
func (l *load) stop() bool {
	l.end()
	done := make(chan struct{})
	go func() {
		l.wg.Wait()
		close(done)
	}()
	defer l.abort()
	select {
	case <-done:
		return true
	case <-time.After(patience):
		l.abort()
		<-done
		return false
	}
}

// all returns the results so far.
func (l *load) all() []visit {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]visit(nil), l.visits...)
}

func (l *load) client(i int) {
	rng := rand.New(rand.NewPCG(7, uint64(i))) //nolint:gosec // not a secret
	turns := cmp.Or(l.turns, 6)
	for conv, n := 0, 0; l.ctx.Err() == nil; conv++ {
		c := chat{Model: "canned", Stream: true}
		session := ""
		if i%2 == 0 {
			session = fmt.Sprintf("client-%d-conversation-%d", i, conv)
		}
		for turn := 0; turn < turns && l.ctx.Err() == nil; n++ {
			if len(c.Messages) == 2*turn {
				c.Messages = append(c.Messages, message{"user", fmt.Sprintf("%d %d ", i, conv) + prose(rng, 200, 400)})
			}
			v, text := l.ask(i, n, c, session)
			for again := 0; v.fate == failed && v.status == 0 && again < l.resends; again++ {
				l.mu.Lock()
				l.resent++
				l.mu.Unlock()
				v, text = l.ask(i, n, c, session)
			}
			v.turn = turn
			l.mu.Lock()
			l.visits = append(l.visits, v)
			l.mu.Unlock()
			if v.fate == served {
				c.Messages = append(c.Messages, message{"assistant", text})
				turn++
			} else {
				pausing(l.ctx, 50*time.Millisecond) // as a client does that asks again
			}
		}
	}
}

// slowHeader marks a request whose client reads slowly.
const slowHeader = "X-Slow"

func pausing(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// ask makes a request and returns its fate and the words of its answer.
func (l *load) ask(i, n int, c chat, session string) (v visit, text string) {
	v = visit{client: i, session: session, begun: time.Now(), fate: failed}
	ctx := l.run
	if l.patience != nil {
		if d := l.patience(i, n); d > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
	}
	defer func() {
		v.ended = time.Now()
		if v.fate != served && ctx.Err() != nil {
			v.fate = left
		}
	}()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, l.s.url+"/v1/chat/completions", bytes.NewReader(c.body()))
	if err != nil {
		v.err = err
		return v, ""
	}
	req.Header.Set("Content-Type", "application/json")
	if session != "" {
		req.Header.Set("X-Session-Id", session)
	}
	slow := l.slow != nil && l.slow(i)
	if slow {
		req.Header.Set(slowHeader, "yes")
	}
	resp, err := l.s.client.Do(req)
	if err != nil {
		v.err = err
		return v, ""
	}
	defer resp.Body.Close()
	v.status, v.header, v.engine = resp.StatusCode, resp.Header, resp.Header.Get(canned.EngineHeader)
	if resp.StatusCode != http.StatusOK {
		v.body, v.err = io.ReadAll(resp.Body)
		return v, ""
	}
	var body io.Reader = resp.Body
	if slow {
		body = &trickle{ctx: ctx, r: resp.Body}
	}
	text = v.read(body)
	return v, text
}

// read reads a streamed answer to its end and returns its words.
func (v *visit) read(body io.Reader) string {
	var text strings.Builder
	v.fate = strange
	lines := bufio.NewReaderSize(body, 128<<10)
	for {
		line, err := lines.ReadSlice('\n')
		data, is := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data: "))
		switch {
		case is && string(data) == "[DONE]":
			if v.fate == strange {
				v.fate = served
			}
		case is:
			var doc struct {
				choices
				Error json.RawMessage `json:"error"`
			}
			if json.Unmarshal(data, &doc) != nil {
				break
			}
			if doc.Error != nil || bytes.Contains(data, []byte(`"abort"`)) {
				v.fate = failed
				if bytes.Contains(doc.Error, []byte("stream_broken")) {
					v.fate = broken
				}
			}
			for _, c := range doc.Choices {
				if c.Delta.Content != "" && v.first.IsZero() {
					v.first = time.Now()
				}
				text.WriteString(c.Delta.Content)
			}
		}
		if err == io.EOF {
			return text.String()
		}
		if err != nil && err != bufio.ErrBufferFull {
			v.fate, v.err = broken, err
			return text.String()
		}
	}
}

// trickle reads slowly, as over a slow connection, and reads the rest at once after a
// while.
type trickle struct {
	ctx   context.Context
	r     io.Reader
	reads int
}

func (s *trickle) Read(p []byte) (int, error) {
	if s.reads++; s.reads < 40 {
		pausing(s.ctx, 40*time.Millisecond)
		p = p[:min(len(p), 2<<10)]
	}
	return s.r.Read(p)
}
