package engine

import (
	"bytes"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
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

// tellDynamo reads the version from /health, if that tells one. It decides
// whether the frontend keeps caches apart.
func (s *server) tellDynamo(told *Info) {
	_, body := s.ask("/health")
	told.Version = readVersion(readObject(body))
}

// maxDynamoSession is the longest id of a session that Dynamo takes, in bytes.
const maxDynamoSession = 256

// toDynamo leaves nvext in the body, once, without what the Dynamo must not see
// or would refuse. The session and the pin go in headers. Dynamo's workers are
// not ours: a pin names one of its instances only if the operator says which.
func (f *fit) toDynamo() {
	if f.pinned() && f.Settings.DynamoInstance != 0 {
		f.pin()
	}
	if f.Ext.Tenant != "" {
		f.header(nvext.HeaderTenant, printable(f.Ext.Tenant))
	}
	f.dynamoSession()
	if f.Body == nil {
		return
	}
	if f.said&CacheSalt != 0 {
		f.Body.Cut(nameSalt) // it is in nvext, or in the tenant's header
	}
	f.Body.OnlyNVExt()
	at, ok := f.Body.NVExt()
	if !ok {
		return
	}
	for _, c := range nvext.Cuts(nil, f.Body.Text(at), f.Grants&^nvext.Pins, f.Ext.Tenant != "") {
		f.Body.Replace(rawjson.Edit{Span: at.Within(c.Span)})
	}
}

// dynamoSessions are the headers in which Dynamo looks for the session of a request and the one that has begun it, its own names and those of
// coding agents (lib/llm/src/protocols/agents.rs). Its own go before.
var dynamoSessions = []string{
	nvext.HeaderSession, "X-Dynamo-Parent-Session-Id",
	"X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id", "X-Claude-Code-Parent-Agent-Id",
	"Thread-Id", "Session-Id", "X-Codex-Parent-Thread-Id",
	"X-Deepseek-Harness-Session-Id", "X-Deepseek-Harness-Parent-Session-Id",
	"X-Session-Id", "X-Parent-Session-Id",
}

// dynamoSession names the session by header, and scopes those that the client
// names so. What ends a session, X-Dynamo-Session-Final, ends the one that the
// request is of, and is without effect where there is none.
func (f *fit) dynamoSession() {
	if id := f.Ext.Session(); id != "" {
		f.Headers = append(f.Headers, Header{nvext.HeaderSession, f.session(id), true})
	}
	if f.Salt == "" {
		return
	}
	for _, name := range dynamoSessions {
		if values := f.Sent[name]; len(values) > 0 {
			if id := strings.TrimSpace(values[0]); id != "" {
				f.header(name, f.session(id))
			}
		}
	}
}

// session returns what a session is called in a Dynamo.
func (f *fit) session(id string) string {
	if f.Salt != "" {
		return short(ScopedSession(f.Salt, id), 0)
	}
	return short(shown(id), maxDynamoSession)
}

// pinned tells whether the client named the worker.
func (f *fit) pinned() bool { return f.Ext.BackendInstanceID.Set || f.Ext.DecodeWorkerID.Set }

// pin names the instance, and the rank if the client did.
func (f *fit) pin() {
	f.header("X-Dynamo-Worker-Instance-Id", strconv.FormatUint(f.Settings.DynamoInstance, 10))
	if r := f.Ext.DPRank; r.Set {
		f.header("X-Dynamo-Dp-Rank", strconv.FormatUint(uint64(r.Value), 10))
	}
}

// printable returns a tenant as a Dynamo can read it in a header, which it takes
// for none if it has other bytes than visible ASCII, spaces and tabs.
func printable(tenant string) string {
	for i := range len(tenant) {
		if c := tenant[i]; c != '\t' && (c < ' ' || c > '~') {
			return short(tenant, 0)
		}
	}
	return tenant
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
