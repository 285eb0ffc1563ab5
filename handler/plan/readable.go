package plan

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// mustRead refuses a request whose body the router could not read, for a tenant or if
// enforce_cache_salt is on. The body could name another tenant's cache or session. Where engines
// transfer prompts to each other, the body of an inference could name any host as the other engine.
func (rd *Reader) mustRead(p *Plan) error {
	why := "the request has a tenant, enforce_cache_salt is on, or engines transfer prompts"
	if p.Everywhere && p.Once != nil {
		why = "the request must go to all engines"
	} else if p.unread == "" || p.Ext.Tenant == "" && !rd.EnforcesSalt && !rd.mayTransfer(p) {
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
		"the router cannot read the body (%s), and must, because %s", p.unread, why)}
}

// mayTransfer returns whether an engine may read from an inference which host to transfer from.
func (rd *Reader) mayTransfer(p *Plan) bool {
	return p.prefills && (p.API != nil || body.IsJSON(body.MediaType(p.HTTP.Header))) && rd.Transfers() &&
		rd.Grants(p.HTTP)&nvext.Pins == 0
}

var errSessionList = errors.New(
	"session_params: must be one object if the request has a salt (cache_salt or X-Tenant-Id)")
