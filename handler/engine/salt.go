package engine

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// salted are the APIs in which an engine gets a salt for its cache.
type salted struct {
	// sure are the APIs in which the engine isolates prompts with different salts,
	// from the version since on.
	sure  []string
	since []int
	// also are the APIs in which that depends on the version. Other versions ignore
	// the salt.
	also []string
	// most is the longest salt that the engine accepts, in bytes.
	most int
}

// salts are the salted APIs by engine type. llama.cpp has none: each slot keeps the
// cache of its last prompt, and any other prompt may share it. vLLM accepts a salt
// in messages and pooling in newer versions only, and loses it for embeddings in
// chunks. An engine of unknown type gets a salt, too: it may refuse the salt, but
// cannot lose it silently.
var salts = map[string]salted{
	VLLM: {
		sure: []string{apiChat, apiCompletions, apiResponses, apiTokens}, since: []int{0, 10, 1}, most: maxVLLMSalt,
		also: []string{apiMessages, "embeddings", "rerank", "score", "classify", "pooling", Invocations},
	},
	SGLang: {sure: []string{apiChat, apiCompletions, apiResponses, apiGenerate}, since: []int{0, 5, 4}, also: []string{Invocations}, most: math.MaxInt},
	TRTLLM: {sure: []string{apiChat}, most: math.MaxInt},
	Other:  {also: []string{apiChat, apiCompletions, apiResponses}, most: maxVLLMSalt},
	"":     {also: []string{apiChat, apiCompletions, apiResponses}, most: maxVLLMSalt},
}

// maxVLLMSalt is the longest salt that vLLM accepts, in characters.
const maxVLLMSalt = 1024

// IsolatesCaches returns whether an engine isolates the caches of requests with
// different salts, in an API: the engine gets the salt there and heeds it, or the
// operator says so.
func (e *Engine) IsolatesCaches(api string) bool {
	set, version := e.Settings, e.Info.Version
	if set.CacheSalt == Off {
		return false
	}
	if e.Type == Dynamo {
		known := version != "" && !before(strings.TrimPrefix(version, "v"), 1, 3)
		return set.CacheSalt.or(known && slices.Contains([]string{apiChat, apiCompletions}, api))
	}
	s := salts[e.Type]
	sure := slices.Contains(s.sure, api)
	known := s.since == nil || version != "" && !before(version, s.since...)
	return set.CacheSalt.or(sure && known) && (sure || slices.Contains(s.also, api))
}

// cacheSalt gives the engine the salt. If the engine accepts none, cacheSalt removes
// the client's own member, which could name another tenant's salt.
func (f *fit) cacheSalt() {
	if f.said&CacheSalt == 0 {
		return
	}
	s := salts[f.Type]
	if f.takes(CacheSalt, f.on(s.sure...) || f.on(s.also...)) {
		f.text(nameSalt, f.salt(s.most))
	} else {
		f.Body.Cut(nameSalt)
	}
	f.extraKey()
}

const nameSalt, nameExtraKey = "cache_salt", "extra_key"

// extraKey puts the salt before SGLang's other member that isolates caches. SGLang
// joins the two: a client could otherwise turn its tenant's salt into another's.
// Older versions of /generate know this member only, so there it is always set.
func (f *fit) extraKey() {
	if f.Type != SGLang {
		return
	}
	own := f.Body.Value(nameExtraKey)
	if isNull(own) {
		own = nil
	}
	salt := short(f.Ext.Salt(""), 0)
	switch {
	case own == nil && !f.on(apiGenerate):
	case len(own) > maxWritten:
		f.text(nameExtraKey, salt+digest(own))
	case own != nil && own[0] == '"':
		f.Body.Set(nameExtraKey, behind(salt, own))
	default: // none, or a list
		f.text(nameExtraKey, salt+string(own))
	}
}

// salt returns the salt for an engine, of at most that many bytes. A digest replaces
// invalid UTF-8, which JSON cannot express: two salts must not become one.
func (f *fit) salt(most int) string {
	s := f.Ext.Salt("")
	if !utf8.ValidString(s) {
		most = 0
	}
	return short(s, most)
}

// isNull returns whether a member is absent or null, which engines treat alike.
func isNull(value []byte) bool { return value == nil || bytes.Equal(value, []byte("null")) }

// steering is an engine's own member that does what nvext needs a grant for.
type steering struct {
	member string
	grant  nvext.Grants
	heeded bool
}

const namePriority, nameRetention, nameRank, nameOldRank = "priority", "retention_seconds", "routed_dp_rank", "data_parallel_rank"

// guard removes the members that steer the engine without the client's grant.
// Members that the engine ignores stay.
func (f *fit) guard() {
	if f.Body == nil {
		return
	}
	for _, s := range f.steerings() {
		if !s.heeded || f.Grants&s.grant != 0 || isNull(f.Body.Value(s.member)) {
			continue
		}
		f.Dropped |= s.grant
		if !f.Body.Changed(s.member) { // else the router has replaced it
			f.Body.Cut(s.member)
		}
	}
}

// steerings returns the members that steer this engine. An engine of unknown type
// may heed ranks.
func (f *fit) steerings() []steering {
	unknown := f.Type == "" || f.Type == Other
	ranked, ordered := unknown, f.Settings.Priority == On
	var more []steering
	switch f.Type {
	case LlamaCpp:
		return []steering{{"id_slot", nvext.Pins, true}}
	case SGLang:
		evicts := f.evicts()
		ranked, ordered = true, evicts || f.Settings.Priority.or(f.Info.Priority)
		more = []steering{{nameRetention, nvext.Priorities, evicts}}
	}
	return append([]steering{
		{nameRank, nvext.Pins, ranked},
		{nameOldRank, nvext.Pins, ranked},
		{"disagg_prefill_dp_rank", nvext.Pins, ranked},
		{namePriority, nvext.Priorities, ordered},
	}, more...)
}
