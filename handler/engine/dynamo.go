package engine

import (
	"bytes"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// Dynamo is NVIDIA Dynamo's frontend.
const Dynamo = "dynamo"

// dynamo is a router itself: it gets nvext, and chooses worker and rank.
var dynamo = kind{
	name: Dynamo, shows: (*server).isDynamo, read: (*server).readDynamo,
	salts:      salted{sure: []string{api.NameChat, api.NameCompletions}, since: []int{1, 3}, everywhere: true},
	always:     (*adapter).toDynamo,
	tokenize:   (*Question).askDynamo,
	readsNVExt: true,
}

// isDynamo returns whether the server is a Dynamo frontend, by its metrics. It does
// not ask for /health: some servers answer that by sending a request to each of their
// models.
func (s *server) isDynamo() bool {
	owner := s.ownedBy() // empty while the server has no model
	if owner != "nvidia" && (owner != "" || s.isTRTLLM()) {
		return false
	}
	status, page := s.ask(pathMetrics)
	return status == 200 && bytes.Contains(page, []byte("\ndynamo_frontend_"))
}

// readDynamo reads the version from /health, if it is there. Whether the frontend
// isolates caches depends on it.
func (s *server) readDynamo(info *Info) {
	_, body := s.ask("/health")
	info.Version = readVersion(readObject(body))
}

// maxDynamoSession is the longest session id that Dynamo accepts, in bytes.
const maxDynamoSession = 256

// toDynamo keeps nvext in the body, once, without what the Dynamo must not see or
// would refuse. Session and pin go into headers. Dynamo's workers are not ours: a
// pin names one of its instances only if the operator says which.
func (f *adapter) toDynamo() {
	if n := f.Settings.DynamoInstance; n != 0 && (f.Ext.BackendInstanceID.Set || f.Ext.DecodeWorkerID.Set) {
		f.header("X-Dynamo-Worker-Instance-Id", strconv.FormatUint(n, 10))
		if r := f.Ext.DPRank; r.Set {
			f.header("X-Dynamo-Dp-Rank", strconv.FormatUint(uint64(r.Value), 10))
		}
	}
	if f.Ext.Tenant != "" {
		f.header(nvext.HeaderTenant, visible(f.Ext.Tenant, " \t"))
	}
	f.dynamoSession()
	if f.Body == nil {
		return
	}
	if f.requested&CacheSalt != 0 {
		f.Body.Cut(nameSalt) // nvext or the tenant's header has it
	}
	if in, ok := f.Body.Object(nameNVExt); ok {
		nvext.Cut(in, f.Grants&^nvext.Pins, f.Ext.Tenant != "")
	} else {
		f.Body.Cut(nameNVExt)
	}
}

// dynamoSessions are the headers in which Dynamo looks for a request's session and
// its parent: its own names first, then those of coding agents
// (lib/llm/src/protocols/agents.rs).
var dynamoSessions = []string{
	nvext.HeaderSession, "X-Dynamo-Parent-Session-Id",
	"X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id", "X-Claude-Code-Parent-Agent-Id",
	"Thread-Id", "Session-Id", "X-Codex-Parent-Thread-Id",
	"X-Deepseek-Harness-Session-Id", "X-Deepseek-Harness-Parent-Session-Id",
	"X-Session-Id", "X-Parent-Session-Id",
}

// dynamoSession sends the session as a header, and scopes sessions in the client's
// headers. X-Dynamo-Session-Final needs no change: it ends only the request's own
// session.
func (f *adapter) dynamoSession() {
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

// session returns a session's id for a Dynamo.
func (f *adapter) session(id string) string {
	if f.Salt != "" {
		return short(SessionID(f.Salt, "", id), 0)
	}
	return short(visible(id, ""), maxDynamoSession)
}

// visible returns a text unchanged if it has only visible ASCII and the characters
// of also, else a digest of it. Dynamo ignores headers with other characters.
func visible(s, also string) string {
	for i := range len(s) {
		if c := s[i]; (c <= ' ' || c > '~') && strings.IndexByte(also, c) < 0 {
			return short(s, 0)
		}
	}
	return s
}

// askDynamo asks a Dynamo frontend. Newer ones have a tokenizer of vLLM's form,
// which always applies the template (lib/llm/src/http/service/tokenize.rs).
func (q *Question) askDynamo(post Post) []byte {
	if q.Raw {
		return nil
	}
	return q.askTokenizer(post)
}
