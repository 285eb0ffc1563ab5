package plan

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// mustRead refuses a request whose body the router could not read, for a tenant or if
// enforce_cache_salt is on. The body could name another tenant's cache or session.
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
		"the router cannot read the body (%s), and must, "+
			"because the request has a tenant or enforce_cache_salt is on", p.unread)}
}

var errSessionList = errors.New(
	"session_params: must be one object if the request has a salt (cache_salt or X-Tenant-Id)")
