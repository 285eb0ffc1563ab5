package dispatch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/tidwall/gjson"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Some requests mean all engines: they flush the caches, load an adapter or new weights, or pause. To
// abort a request is one of them, too, as only its engine knows it. The router sends them to all workers
// at once, and joins the answers. Workers that are marked down or drain get them, too.

const (
	// maxJoined is how much of each answer is joined, in bytes.
	maxJoined = 1 << 20
	// straggles is how long the router waits for another answer at least.
	straggles = 30 * time.Second
)

// joined is a worker's part of the joined answer.
type joined struct {
	Worker uint64          `json:"worker"`
	Status int             `json:"status"`
	Answer json.RawMessage `json:"answer,omitempty"` // a text if it is no JSON
	Error  string          `json:"error,omitempty"`  // in place of an answer
}

// askAll sends the request to all workers that it means, and returns one answer for theirs. After each
// answer, it waits for the next one as long as all took so far, or straggles.
func (d *Dispatch) askAll(req *http.Request) (*http.Response, error) {
	a, begun := d.attempt, time.Now()
	if d.Body != nil && strings.Contains(d.plan.HTTP.URL.Path, "/abort_request") {
		noteAborts(&d.Pool.Aborts, d.Body.Data, begun)
	}
	ctx, end := context.WithCancel(req.Context())
	defer end()
	late := time.AfterFunc(straggles, end)
	late.Stop()
	workers := d.meant()
	answers := make([]joined, len(workers))
	var asked sync.WaitGroup
	for i, w := range workers {
		to := &answers[i]
		to.Worker = w.ID
		own, err := d.Client.Redirect(req.WithContext(ctx), d.original, &reverseproxy.Upstream{Dial: w.Dial})
		if err != nil {
			to.fail(err)
			continue
		}
		of := attempt.Attempt{Call: &d.Call, Seat: pool.Seat{Attempt: worker.Attempt{Worker: w}, Target: w.Target(0)}}
		sent := of.Build(own)
		asked.Go(func() {
			to.read(d.Transport.Send(sent))
			if to.Error == "" {
				late.Reset(max(straggles, time.Since(begun)))
				d.Prober.AskAgain(w) // it may serve other models now
				if to.Status/100 == 2 && engine.DropsCache(d.plan.HTTP.URL.Path) {
					d.Pool.ClearCache(w, observe.ClearedReset)
				}
			}
		})
	}
	asked.Wait()
	late.Stop()
	if err := req.Context().Err(); err != nil {
		return nil, err
	}
	a.CountOutcome("", false) // this worker is not better or worse than the others
	d.refused(lacksPath)
	a.ForbidMove()
	d.freeBody()
	resp := join(answers)
	resp.Request = req
	d.observe(req, resp)
	return resp, nil
}

// noteAborts records which requests another one aborts, by its body.
func noteAborts(list *pool.Aborts, body []byte, t time.Time) {
	for _, ids := range gjson.GetManyBytes(body, "rid", "request_ids") {
		for _, id := range ids.Array() {
			if id.Str != "" {
				list.Note(t, id.Str)
			}
		}
	}
	if gjson.GetBytes(body, "abort_all").Bool() {
		list.Note(t, "")
	}
}

// meant returns the workers that the request means. If it names a model, these are those that serve it.
// Engines that are known to lack the path are left out. The attempt's own worker comes last.
func (d *Dispatch) meant() (list []*worker.Worker) {
	want := d.Wants()
	want.Tried = nil
	own, path := d.attempt.Worker, d.plan.HTTP.URL.Path
	for i, v := range d.Pool.Judge(&want, d.offers, time.Now()) {
		row := &d.offers.Table.Rows[i]
		if !row.Repeated && row.Worker != own && v != pool.OtherModels && v < pool.NotAllowed && row.Worker.Engine().Means(path) {
			list = append(list, row.Worker)
		}
	}
	if own.Engine().Means(path) || len(list) == 0 {
		list = append(list, own)
	}
	return list
}

func (j *joined) fail(err error) {
	j.Status, j.Error = http.StatusBadGateway, "the worker did not answer"
	if errors.Is(err, context.Canceled) {
		j.Status, j.Error = http.StatusGatewayTimeout, "the worker did not answer in time"
	}
}

func (j *joined) read(resp *http.Response, err error) {
	if err != nil {
		j.fail(err)
		return
	}
	defer resp.Body.Close()
	text, err := upstream.ReadAll(resp.Body, maxJoined)
	if err != nil && !errors.Is(err, upstream.ErrTooLong) {
		j.fail(err)
		return
	}
	j.Status = resp.StatusCode
	j.Answer = rawjson.OrString(text)
}

// join returns one answer. Its status is the worst one. Its body is an object with all answers in the
// member workers. Beside it are the members of the worst answer, if that is an object.
func join(answers []joined) *http.Response {
	worst := slices.MaxFunc(answers, func(x, y joined) int { return x.Status - y.Status })
	all, _ := json.Marshal(answers)
	var o rawjson.Object
	if object := worst.Answer; len(object) > 0 && object[0] == '{' {
		o.Buf = bytes.TrimRight(object[:len(object)-1], " \t\r\n")
		o.Buf, o.More = slices.Clone(o.Buf), len(o.Buf) > 1
	} else {
		o.Open()
	}
	o.Raw("workers", all)
	o.Close()
	return &http.Response{
		StatusCode: worst.Status, Status: strconv.Itoa(worst.Status) + " " + http.StatusText(worst.Status),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(o.Buf)), Body: io.NopCloser(bytes.NewReader(o.Buf)),
		Header: http.Header{"Content-Type": {"application/json"}, "Content-Length": {strconv.Itoa(len(o.Buf))}},
	}
}
