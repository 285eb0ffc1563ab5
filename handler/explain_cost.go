package handler

import (
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// timesView is what is predicted of a candidate.
type timesView struct {
	Awaiting   int     `json:"awaiting_requests"`
	Wait       float64 `json:"wait_ms"`
	Prefill    float64 `json:"prefill_ms"`
	TTFT       float64 `json:"predicted_ttft_ms"`
	Slowness   float64 `json:"slowness"`
	RecentWork float64 `json:"recent_work_ms"`
	// The sum of Terms, times Factor, is Cost; only predicted_latency has terms.
	Terms *termsView `json:"terms_ms,omitempty"`
	// Factor is the client's preference; absent if there is none.
	Factor float64 `json:"factor,omitempty"`
}

// termsView is a kvscore.Terms.
type termsView struct {
	Wait    float64 `json:"wait"`
	Prefill float64 `json:"prefill"`
	Delay   float64 `json:"delay"`
	Decode  float64 `json:"decode"`
	Turns   float64 `json:"turns"`
	Leave   float64 `json:"leave"`
}

func viewTimes(c *kvscore.Candidate, unit string) timesView {
	v := timesView{
		Awaiting: c.Awaiting, Wait: c.WaitTime, Prefill: c.PrefillTime, TTFT: c.TTFT(),
		Slowness: c.Slowness, RecentWork: c.RecentWork, Factor: c.Factor,
	}
	if unit == kvscore.UnitMilliseconds {
		terms := termsView(c.Terms)
		v.Terms = &terms
	}
	return v
}

// homeView is the target that a session is bound to, as a choice sees it.
type homeView struct {
	Worker    uint64 `json:"worker"`
	Dial      string `json:"dial"`
	Rank      uint32 `json:"dp_rank"`
	Candidate bool   `json:"is_candidate"`
	// Holds is whether it holds at least half of what any candidate holds of the
	// prompt.
	Holds bool `json:"holds_prompt"`
	// Leave is the price of going elsewhere; null where the session must not leave.
	Leave *float64 `json:"leave_ms"`
	// Stays is whether the session is still bound to it after this turn.
	Stays bool `json:"session_stays"`
}

// viewHome returns nil if the session is not bound.
func viewHome(p *pool, h *dryHome) *homeView {
	if h == nil {
		return nil
	}
	v := &homeView{
		Worker: h.Target.Worker, Dial: dials(p)[h.Target], Rank: h.Target.Rank,
		Candidate: h.Position >= 0, Holds: h.Holds, Stays: h.Stays,
	}
	if h.Priced {
		v.Leave = &h.Leave
	}
	return v
}
