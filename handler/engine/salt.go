package engine

import (
	"bytes"
	"slices"
	"unicode/utf8"
)

// salted says in which APIs an engine takes a salt for its cache.
type salted struct {
	// sure are the APIs in which the engine isolates prompts with different salts,
	// from the version since on.
	sure  []string
	since []int
	// also are the APIs in which that depends on the version. Other versions ignore
	// the salt.
	also []string
	// everywhere: the engine takes a salt in all other APIs, too.
	everywhere bool
	// most is the longest salt that the engine accepts, in bytes. 0: no limit.
	most int
}

// IsolatesCaches returns whether an engine isolates the caches of requests with different
// salts in an API. It does if it gets the salt there and heeds it, or if the operator's
// cache_salt says so.
func (e *Engine) IsolatesCaches(api string) bool {
	s, version := &kindOf(e.Type).salts, e.Info.Version
	sure := slices.Contains(s.sure, api)
	known := s.since == nil || version != "" && !before(version, s.since...)
	return e.Settings.CacheSalt.or(sure && known) && (sure || s.everywhere || slices.Contains(s.also, api))
}

const nameSalt = "cache_salt"

// cacheSalt gives the engine the salt. If the engine accepts none, cacheSalt removes
// the client's own member, which could name another tenant's salt. A digest replaces
// a salt that is too long, or has invalid UTF-8, which JSON cannot express: two salts
// must not become one.
func (f *adapter) cacheSalt() {
	if f.requested&CacheSalt == 0 {
		return
	}
	if !f.takes(CacheSalt, f.on(f.salts.sure...) || f.on(f.salts.also...)) {
		f.Body.Cut(nameSalt)
		return
	}
	salt := f.Ext.Salt("")
	if most := f.salts.most; most > 0 && len(salt) > most || !utf8.ValidString(salt) {
		salt = digest([]byte(salt))
	}
	f.text(nameSalt, salt)
}

// isNull returns whether a member is absent or null, which engines treat alike.
func isNull(value []byte) bool { return value == nil || bytes.Equal(value, []byte("null")) }
