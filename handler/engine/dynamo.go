package engine

import (
	"bytes"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// isDynamo tells whether the server is a Dynamo frontend, by its metrics. It is
// a router itself: it tells no capacity, and which of its workers and ranks
// computes what is its own choice. Who is not known to be one is not asked for its
// health, though that would show it: there are servers which make a request of
// every model they have for that answer.
func (s *server) isDynamo() bool {
	owner := s.listed() // none while it has no model
	if owner != "nvidia" && (owner != "" || s.isTRTLLM()) {
		return false
	}
	status, page := s.ask(pathMetrics)
	return status == 200 && bytes.Contains(page, []byte("\ndynamo_frontend_"))
}

// tellDynamo takes the version from its health, if that has one: it decides on
// what nvext may have.
func (s *server) tellDynamo(told *Told) {
	_, body := s.ask("/health")
	told.Version = readVersion(readObject(body))
}

// maxDynamoSession is the longest id of a session that Dynamo takes, in bytes.
const maxDynamoSession = 256

// generation returns what a Dynamo of a version takes in nvext. Where it does not
// tell, it is taken to be of this time.
func generation(version string) nvext.Generation {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	switch m, err := strconv.Atoi(minor); {
	case major == "0", major == "1" && err == nil && m < 3:
		return nvext.Dynamo10
	}
	return nvext.Dynamo13
}

// toDynamo leaves nvext in the body, once, less what the Dynamo must not see or
// would refuse; the rest is in headers, which pass as far as they are granted.
// Its workers are not ours: a pin names one of its instances only if the
// operator says which.
func (f *fit) toDynamo() {
	gen := generation(f.Told.Version)
	if f.pinned() && f.Settings.DynamoInstance != 0 {
		f.pin(gen)
	}
	if id := f.Ext.Session(); id != "" && gen == nvext.Dynamo13 {
		f.Headers = append(f.Headers, Header{nvext.HeaderSession, short(shown(id), maxDynamoSession), true})
	}
	if gen == nvext.Dynamo10 {
		f.Lacks = f.said & CacheSalt // it has none, and would not say so
	}
	if f.Body == nil {
		return
	}
	f.Body.OnlyNVExt()
	at, ok := f.Body.NVExt()
	if !ok {
		return
	}
	for _, e := range nvext.Edits(nil, f.Body.Text(at), gen, f.Grants&^nvext.Pins, f.Options) {
		f.Body.Replace(api.Edit{Span: api.Span{Start: at.Start + e.Start, End: at.Start + e.End}, Text: []byte(e.Text)})
	}
}

// pinned tells whether the client named the worker.
func (f *fit) pinned() bool { return f.Ext.BackendInstanceID.Set || f.Ext.DecodeWorkerID.Set }

// pin names the instance, and the rank if the client did.
func (f *fit) pin(gen nvext.Generation) {
	worker, rank := "X-Dynamo-Worker-Instance-Id", "X-Dynamo-Dp-Rank"
	if gen == nvext.Dynamo10 {
		worker, rank = "X-Worker-Instance-Id", "X-Dp-Rank"
	}
	f.header(worker, strconv.FormatUint(f.Settings.DynamoInstance, 10))
	if r := f.Ext.DPRank; r.Set {
		f.header(rank, strconv.FormatUint(uint64(r.Value), 10))
	}
}

// shown returns a text as a header can have it: one with other characters than
// that as a digest.
func shown(s string) string {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return short(s, 0)
		}
	}
	return s
}
