package engine

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// salted are the APIs in which an engine is given the salt of its cache.
type salted struct {
	// sure are those in which it is known to keep prompts with different salts
	// apart, from the version since on.
	sure  []string
	since []int
	// also are those in which it depends on the version, and others pass over
	// the member.
	also []string
	// most is the longest salt that it takes, in bytes.
	most int
}

// salts are those of the engines. llama.cpp has none, for each slot keeps the
// cache of its own last prompt, which any other may share. vLLM's messages and
// what it pools take one in newer versions, of which no list is kept here, and
// what is embedded in chunks has lost it. Who is not known is given one all the
// same, for it is better refused than lost.
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

// maxVLLMSalt is the longest salt that vLLM takes, in characters.
const maxVLLMSalt = 1024

// KeepsApart tells whether an engine is known to keep the caches of requests with
// different salts apart, in an API: whether it is given the salt there, and heeds
// it, or the operator says so.
func (e *Engine) KeepsApart(api string) bool {
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

// cacheSalt gives the engine the salt, or where it takes none at least not the
// one that the client wrote beside it, which would be another one's.
func (f *fit) cacheSalt() {
	s := salts[f.Type]
	switch {
	case f.said&CacheSalt == 0:
	case f.takes(CacheSalt, f.on(s.sure...) || f.on(s.also...)):
		f.text(nameSalt, f.salt(s.most))
		f.extraKey()
	default:
		f.Body.Cut(nameSalt)
		f.extraKey()
	}
}

const nameSalt, nameExtraKey = "cache_salt", "extra_key"

// extraKey puts the salt before SGLang's other member that keeps caches apart.
// SGLang joins the two, so that a client could otherwise turn its tenant's salt
// into another's. /generate had only this member for long: there it is always set.
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

// salt returns the salt as an engine can have it, of at most so many bytes: what
// is no UTF-8, which JSON cannot say, as a digest, for it must not become what
// another one becomes.
func (f *fit) salt(most int) string {
	s := f.Ext.Salt("")
	if !utf8.ValidString(s) {
		most = 0
	}
	return short(s, most)
}

// isNull tells whether a member is not there, for engines.
func isNull(value []byte) bool { return value == nil || bytes.Equal(value, []byte("null")) }
