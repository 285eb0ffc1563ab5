package dispatch

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/quota"
)

// Charge charges what the request has used of its tenant's limits. It returns false if the engine's
// counts of tokens are impossible. A request that no engine has answered costs nothing, unless its
// client left while one computed.
func (r *Report) Charge(now time.Time, res *quota.Reservation) (plausible bool) {
	switch {
	case r.Status >= 400:
		res.Refused(now)
	case r.Status == 0 && (r.attempt == nil || r.Outcome != outcomeClientGone):
		res.Drop(now)
	default:
		return res.Settle(now, quota.Usage{
			Prompt: r.Prompt, Completion: r.Completion, Cached: r.Cached, Seen: int64(r.chunks), Whole: r.Outcome == outcomeOK && !r.streamed,
		})
	}
	return true
}
