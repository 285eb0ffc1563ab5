package handler

import "time"

// longestHeadStart bounds what a priority is worth, in seconds: more than
// anybody waits.
const longestHeadStart = 1e9

// precedence returns the request's place among those who wait, as Dynamo's
// queue orders them (lib/kv-router/src/scheduling/queue.rs): strict priorities
// are tiers, the higher ones first; in a tier the time of arrival counts, with a
// head start of as many seconds as the priority says.
func (rt *route) precedence() (tier int, arrival time.Time) {
	hints := &rt.plan.ext.AgentHints
	jump := min(hints.PriorityJump(), longestHeadStart)
	return -int(hints.StrictPriority.Value), rt.ready.Add(-time.Duration(jump * float64(time.Second)))
}
