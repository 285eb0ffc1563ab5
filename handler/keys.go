package handler

import (
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// maxSessionKey is the longest session key that is kept as it is.
const maxSessionKey = 256

// Keys of the store of sessions that are not a client's as they are begin with
// own and a letter. No client's key does, or else one could take another's
// place.
const (
	own        = "\x00"
	ownTenant  = own + "t" // a session of a tenant
	ownDigest  = own + "d" // one of these that is too long
	digestMark = "sha256:"
)

// keptKey returns what a session's key is kept as.
func keptKey(key string) string {
	if len(key) > maxSessionKey || strings.HasPrefix(key, own) {
		return digestMark + nvext.Digest([]byte(key))
	}
	return strings.Clone(key) // it may point into the body
}

// tenantKey returns what a session's key is kept as where the request has a
// salt, so that no tenant can name another's session.
func tenantKey(salt, key string) string {
	if salt == "" {
		return keptKey(key)
	}
	return bounded(ownTenant + strconv.Itoa(len(salt)) + ":" + salt + key)
}

// modelKey returns what a session is kept as for one of its models.
func modelKey(session, model string) string {
	key := session + own + model
	if strings.HasPrefix(session, own) {
		return bounded(key)
	}
	return keptKey(key)
}

// bounded returns a key of ours, or its digest, if it is too long.
func bounded(key string) string {
	if len(key) > maxSessionKey {
		return ownDigest + nvext.Digest([]byte(key))
	}
	return key
}
