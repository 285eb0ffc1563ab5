package dispatch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// sender makes one round trip.
type sender func(*http.Request) (*http.Response, error)

// maxExact is the longest answer of an engine to one question about a stream, in bytes.
const maxExact = 64 << 20

// errExact means that an engine's answers do not fit its endpoints.
var errExact = errors.New("the engine cannot go on with the answer's token ids")

// exactly returns a sender that asks the engine for the rest of a stream by ids. The answer has the
// form of the client's API. It is the engine's refusal if that lacks the endpoints.
func (a *attempt) exactly(send sender) sender {
	d := a.d
	return func(req *http.Request) (*http.Response, error) {
		request, err := io.ReadAll(req.Body)
		_ = req.Body.Close()
		if err != nil {
			return nil, &api.Refusal{Err: err}
		}
		x := engine.NewExact(d.plan.API.Name(), request, d.rest.IDs())
		if x == nil {
			return nil, &api.Refusal{Err: errExact}
		}
		render, generate, derender := x.Paths(req.URL.Path)
		post := func(path string, body []byte) (*http.Response, error) { return send(posts(req, path, body)) }
		rendered, resp, err := a.whole(post(render, request))
		if rendered == nil {
			return resp, err
		}
		ask, ok := x.Generate(rendered)
		if !ok {
			return nil, &api.Refusal{Err: errExact}
		}
		begun, resp, err := a.whole(post(derender, x.Derender(nil)))
		if begun == nil {
			return resp, err
		}
		if _, ok = x.Event(begun); !ok { // which the client has
			return nil, &api.Refusal{Err: errExact}
		}
		if resp, err = post(generate, ask); err == nil && resp.StatusCode == http.StatusOK {
			resp.Body = &derendered{ReadCloser: resp.Body, x: x, ask: func(body []byte) ([]byte, error) {
				answer, resp, err := a.whole(post(derender, body))
				if resp != nil {
					_ = resp.Body.Close()
					err = fmt.Errorf("%w: status %d", errExact, resp.StatusCode)
				}
				return answer, err
			}}
		}
		return resp, err
	}
}

// posts returns a request like another one, with another path and body.
func posts(like *http.Request, path string, body []byte) *http.Request {
	req := *like
	req.URL = new(url.URL)
	*req.URL = *like.URL
	req.URL.Path, req.URL.RawPath = path, ""
	req.Body, req.ContentLength, req.GetBody = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	return &req
}

// whole reads an answer. If it is a refusal, it returns that instead.
func (a *attempt) whole(resp *http.Response, err error) ([]byte, *http.Response, error) {
	if err != nil {
		return nil, nil, err
	}
	if resp.StatusCode != http.StatusOK {
		if !retryable(resp.StatusCode) {
			of := a.d.Pool
			of.Incidents.Raise(time.Now(), "streams cannot go on exactly: an engine refuses", of.Logger)
		}
		return nil, resp, nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxExact+1))
	if err == nil && len(body) > maxExact {
		err = errExact
	}
	if err != nil {
		return nil, nil, err
	}
	return body, nil, nil
}

// derendered is the rest of a stream in the form of the client's API.
type derendered struct {
	io.ReadCloser // what the engine generates
	x             *engine.Exact
	ask           func([]byte) ([]byte, error)
	frames        rawjson.Framer
	in            []byte
	out           []byte // is read next
	err           error  // follows
}

func (r *derendered) Read(p []byte) (int, error) {
	for len(r.out) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		r.out = r.out[:0]
		if err := r.next(); err != nil {
			r.err = err
		}
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
	n, err := r.ReadCloser.Read(r.in)
	r.frames.Write(r.in[:n], err != nil)
	pieces, rest := [][]byte{}, [][]byte(nil) // the rest follows the tokens
	for f, ok := r.frames.Next(); ok; f, ok = r.frames.Next() {
		data := bytes.Clone(f.Data)
		switch usage := r.x.Usage(data); {
		case usage != nil:
			rest = append(rest, usage)
		case bytes.Contains(data, []byte(`"token_ids"`)):
			pieces = append(pieces, data)
		default: // an error, or the end
			rest = append(rest, data)
		}
	}
	if len(pieces) > 0 {
		if derr := r.derender(pieces); derr != nil {
			return derr
		}
	}
	for _, data := range rest {
		r.write(data)
	}
	return err
}

func (r *derendered) derender(pieces [][]byte) error {
	ask := r.x.Derender(pieces)
	if ask == nil {
		return nil
	}
	answer, err := r.ask(ask)
	if err != nil {
		return err
	}
	data, ok := r.x.Event(answer)
	if !ok {
		return errExact
	}
	r.write(data)
	return nil
}

func (r *derendered) write(data []byte) {
	r.out = append(append(append(r.out, "data: "...), data...), "\n\n"...)
}
