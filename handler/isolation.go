package handler

import (
	"fmt"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// mustRead refuses a request whose body the router could not read, if the request is a
// tenant's or cache_salt is enforced: the body could name another tenant's cache or
// session.
func (rd *reader) mustRead(p *plan) error {
	if p.unread == "" || p.ext.Tenant == "" && !rd.enforcesSalt {
		return nil
	}
	status := http.StatusBadRequest
	switch p.unread {
	case fallbackOversized:
		status = http.StatusRequestEntityTooLarge
	case fallbackMemory:
		status = http.StatusServiceUnavailable
	}
	return &api.Refusal{API: orUnplanned(p.api), Status: status, Code: api.CodeUnreadable, Err: fmt.Errorf(
		"the router must read the body, as the request is a tenant's or cache_salt is enforced, and cannot (%s)", p.unread)}
}

// saltIsText refuses a salt that is not a string, if cache_salt is enforced and no
// tenant replaces it: no engine is known to use such a salt.
func (rd *reader) saltIsText(r *http.Request, p *plan) error {
	req := p.parsed()
	if !rd.enforcesSalt || req == nil || req.OddSalt == "" || p.ext.Salt("") != "" || !leavesCache(r, p) {
		return nil
	}
	return &api.Refusal{API: orUnplanned(p.api), Status: http.StatusBadRequest, Code: api.CodeShared, Param: "cache_salt", Err: fmt.Errorf(
		"cache_salt: must be a string, got %s", req.OddSalt)}
}

// leavesCache returns whether the engine computes a prompt, and so fills its cache.
func leavesCache(r *http.Request, p *plan) bool {
	return p.api != nil && p.api.Work() != api.Count || p.api == nil && infersUnplanned(r)
}
