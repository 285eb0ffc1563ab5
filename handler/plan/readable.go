package plan

import (
	"fmt"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// mustRead refuses a request whose body the router could not read, if the request is a
// tenant's or enforce_cache_salt is on: the body could name another tenant's cache or
// session.
func (rd *Reader) mustRead(p *Plan) error {
	if p.unread == "" || p.Ext.Tenant == "" && !rd.EnforcesSalt {
		return nil
	}
	status := http.StatusBadRequest
	switch p.unread {
	case fallbackOversized:
		status = http.StatusRequestEntityTooLarge
	case FallbackMemory:
		status = http.StatusServiceUnavailable
	}
	return &api.Refusal{API: OrUnplanned(p.API), Status: status, Code: api.CodeUnreadable, Err: fmt.Errorf(
		"the router must read the body, because the request is a tenant's or enforce_cache_salt is on, and cannot (%s)", p.unread)}
}

// saltIsText refuses a salt that is not a string, if enforce_cache_salt is on and no
// tenant replaces it: no engine is known to use such a salt.
func (rd *Reader) saltIsText(p *Plan) error {
	req := p.Parsed()
	if !rd.EnforcesSalt || req == nil || req.OddSalt == "" || p.Ext.Salt("") != "" || !p.prefills {
		return nil
	}
	return &api.Refusal{API: OrUnplanned(p.API), Status: http.StatusBadRequest, Code: api.CodeShared, Param: "cache_salt", Err: fmt.Errorf(
		"cache_salt: must be a string, got %s", req.OddSalt)}
}
