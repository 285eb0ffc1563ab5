package resume

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
)

// maxExact is the longest answer of an engine to one question about a stream, in bytes.
const maxExact = 8 << 20

// ErrExact means that an engine cannot go on with an answer's ids. It may go on otherwise.
var ErrExact = errors.New("the engine cannot go on with the ids of the answer's tokens")

// errExactly says the same, and that it is not the worker's fault.
var errExactly = &api.Refusal{Err: ErrExact}

// Exactly returns a sender that asks the engine for the rest of a stream by ids. The answer has the
// form of the client's API. It is the engine's refusal if that lacks the endpoints.
func Exactly(a *attempt.Attempt, send attempt.Sender) attempt.Sender {
	c := a.Call
	return func(req *http.Request) (*http.Response, error) {
		request, err := io.ReadAll(req.Body)
		_ = req.Body.Close()
		ids, lens := c.Rest.IDs()
		x := engine.NewExact(c.Plan.API.Name(), request, ids, lens)
		if err != nil || x == nil {
			return nil, errExactly
		}
		render, generate, derender := x.Paths(req.URL.Path)
		post := func(path string, body []byte) (*http.Response, error) { return send(posts(req, path, body)) }
		rendered, resp, err := whole(c.Pool, post, render, request)
		if rendered == nil {
			return resp, err
		}
		r := &derendered{x: x, ask: func(ask []byte) ([]byte, *http.Response, error) {
			goOn := a.Suspend() // the turn is no time of the worker's
			done, err := a.Worker.Derender(req.Context())
			goOn()
			if err != nil {
				return nil, nil, err
			}
			defer done()
			return whole(c.Pool, post, derender, ask)
		}}
		ask, ok := x.Generate(rendered)
		within, free := c.Pool.Memory.Reserve(4 * x.Size())
		if r.free = sync.OnceFunc(free); !ok || !within {
			r.free()
			return nil, errExactly
		}
		begun, resp, err := r.ask(x.Derender(nil)) // which the client has
		if begun != nil {
			if _, ok = x.Event(begun); ok {
				resp, err = post(generate, ask)
			} else {
				err = errExactly
			}
		}
		if err != nil || resp.StatusCode != http.StatusOK {
			r.free()
			return resp, err
		}
		r.from, resp.Body = resp.Body, r
		return resp, nil
	}
}

// posts returns a request like another one, with another path and body. net/http repeats it if a
// kept connection is closed, as it does with the other one.
func posts(like *http.Request, path string, body []byte) *http.Request {
	req := *like
	req.URL = new(url.URL)
	*req.URL = *like.URL
	req.URL.Path, req.URL.RawPath = path, ""
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	req.Body, _ = req.GetBody()
	req.ContentLength = int64(len(body))
	return &req
}

// whole posts a question and reads the answer. If it is a refusal, it returns that instead.
func whole(
	of *pool.Pool, post func(string, []byte) (*http.Response, error), path string, ask []byte,
) ([]byte, *http.Response, error) {
	resp, err := post(path, ask)
	if err != nil {
		return nil, nil, err
	}
	if resp.StatusCode != http.StatusOK {
		if !attempt.Retryable(resp.StatusCode) {
			of.Raise(time.Now(), "streams cannot go on exactly: an engine refuses")
		}
		return nil, resp, nil
	}
	defer resp.Body.Close()
	answer, err := upstream.ReadAll(resp.Body, maxExact)
	switch {
	case errors.Is(err, upstream.ErrTooLong):
		return nil, nil, errExactly
	case err != nil:
		return nil, nil, err
	}
	return answer, nil, nil
}

// derendered is the rest of a stream in the form of the client's API.
type derendered struct {
	from   io.ReadCloser // what the engine generates
	x      *engine.Exact
	ask    func([]byte) ([]byte, *http.Response, error)
	frames rawjson.Framer
	in     []byte
	out    []byte // is read next
	err    error  // follows
	free   func() // the memory that is reserved for the calls
}

func (r *derendered) Close() error {
	r.free()
	return r.from.Close()
}

func (r *derendered) Read(p []byte) (int, error) {
	for len(r.out) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		r.out = r.out[:0]
		r.err = r.next()
	}
	n := copy(p, r.out)
	r.out = r.out[n:]
	return n, nil
}

// next turns what has come from the engine, one event or several, into events of the client's.
func (r *derendered) next() error {
	if r.in == nil {
		r.in = make([]byte, 32<<10)
	}
	n, err := r.from.Read(r.in)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	r.frames.Write(r.in[:n], false) // without an event that is torn
	var pieces, rest [][]byte       // the rest follows the tokens
	for f, ok := r.frames.Next(); ok; f, ok = r.frames.Next() {
		data := bytes.Clone(f.Data)
		switch usage := r.x.Usage(data); {
		case usage != nil:
			rest = append(rest, usage)
		case bytes.Contains(data, []byte(`"token_ids"`)):
			if r.x.Aborts(data) { // an event of its own, which the stream's reader takes for a failure
				if refused := r.derender(pieces); refused != nil {
					return refused
				}
				pieces = nil
			}
			pieces = append(pieces, data)
		default: // an error, or the end
			rest = append(rest, data)
		}
	}
	if refused := r.derender(pieces); refused != nil {
		return refused
	}
	for _, data := range rest {
		r.write(data)
	}
	return err
}

func (r *derendered) derender(pieces [][]byte) error {
	if len(pieces) == 0 {
		return nil
	}
	ask := r.x.Derender(pieces)
	if ask == nil {
		return nil
	}
	answer, refused, err := r.ask(ask)
	if refused != nil {
		_ = refused.Body.Close()
		err = fmt.Errorf("%w: status %d", ErrExact, refused.StatusCode)
	}
	if err != nil {
		return err
	}
	data, ok := r.x.Event(answer)
	if !ok {
		return ErrExact
	}
	r.write(data)
	return nil
}

func (r *derendered) write(data []byte) {
	r.out = append(append(append(r.out, "data: "...), data...), "\n\n"...)
}
