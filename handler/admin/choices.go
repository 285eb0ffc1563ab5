package admin

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

type pastView struct {
	observe.PastChoice
	Age        float64         `json:"seconds_ago"`
	Queued     float64         `json:"queued_ms,omitzero"`
	Dial       string          `json:"dial"`
	Sentence   string          `json:"sentence"`
	Candidates []candidateView `json:"candidates,omitzero"`
	Waits      *waitView       `json:"waits,omitzero"` // it is still in the queue
}

// viewPast returns the view of a choice, with its candidates if they are wanted. It shows the
// request's id if the client may steer: other clients may have chosen it.
func viewPast(c *observe.PastChoice, candidates, steers bool, t time.Time) pastView {
	v := pastView{PastChoice: *c, Age: round(t.Sub(c.At).Seconds()), Queued: ms(c.Waited)}
	if !steers {
		v.Request = ""
	}
	for i := range c.Candidates {
		of := &c.Candidates[i]
		v.Candidates = append(v.Candidates, viewCandidate(of.Dial, &of.Candidate))
	}
	v.Dial = v.Candidates[0].Dial
	var next *candidateView
	if len(c.Candidates) > 1 {
		next = &v.Candidates[1]
	}
	v.Sentence = sentence(c.Reason, c.Unit, c.Tokens, &v.Candidates[0], next)
	if c.Waited > 0 {
		v.Sentence += fmt.Sprintf(" The request waited %s in the queue: %s.", millis(v.Queued), c.Why)
	}
	if c.Rest != "" {
		v.Sentence = "A stream goes on here (" + c.Rest + "). " + v.Sentence
	}
	if !candidates {
		v.Candidates = nil
	}
	return v
}

// sentence says why a candidate was chosen. next is the best of the others, nil if there was none.
// The unit is empty if no policy compared costs.
func sentence(reason, unit string, tokens int64, chosen, next *candidateView) string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	switch reason {
	case dispatch.ReasonPin:
		return "The request names it."
	case dispatch.ReasonResponse:
		return "It keeps the response that the request names."
	case dispatch.ReasonSession:
		say("The session is bound to it. ")
	}
	switch {
	case tokens == 0:
		say("The prompt is unknown.")
	case chosen.OverlapTokens == 0:
		say("It has nothing cached of %d prompt tokens.", tokens)
	default:
		say("It has %d of %d prompt tokens cached.", chosen.OverlapTokens, tokens)
	}
	switch {
	case next == nil:
		say(" It is the only candidate.")
	case unit != "" && next.Cost < chosen.Cost:
		say(" Cost %s, not the lowest (%s, %s): a draw decided.", cost(chosen.Cost, unit), next.Dial, cost(next.Cost, unit))
	case unit != "":
		say(" Cost %s; next: %s, %s.", cost(chosen.Cost, unit), next.Dial, cost(next.Cost, unit))
	}
	return b.String()
}

func cost(v float64, unit string) string {
	if unit == kvscore.UnitMilliseconds && v >= 10 {
		return fmt.Sprintf("%.0f ms", v)
	}
	return fmt.Sprintf("%.1f %s", v, unit)
}

func getChoices(r *http.Request, p *pool.Pool) (any, error) {
	q := r.URL.Query()
	n, err := numberIn(r, "n")
	if err != nil {
		return nil, err
	}
	id := q.Get("request_id")
	list := []pastView{}
	for _, c := range p.Choices.Past(defaultPage, id, uint64(n)) { //nolint:gosec // it is not negative
		list = append(list, viewPast(&c, true, true, time.Now()))
	}
	if of, why, waits := p.WaitsNow(id, time.Now()); waits && n == 0 {
		v := pastView{Queued: 1e3 * round(of.Oldest), Waits: &waitView{p.Waiting(), why}}
		v.Request, v.Class, v.Tenant = id, of.Class, of.Tenant
		list = append([]pastView{v}, list...)
	}
	if len(list) == 0 && (id != "" || n > 0) {
		return nil, apiError(http.StatusNotFound, "pool %s remembers no such choice; it keeps the last 4096", p.Name)
	}
	return list, nil
}
