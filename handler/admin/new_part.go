package admin

import (
	"fmt"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// newIn returns where the part of a prompt begins that no candidate has cached, to a block. It is new, or has
// been evicted. It is nil if there is none, or the place is unknown.
func newIn(p *plan.Plan, candidates []kvscore.Candidate) *api.Place {
	held := 0
	for i := range candidates {
		held = max(held, candidates[i].HeldBlocks)
	}
	if p.Request == nil || held >= len(p.Score.Blocks) {
		return nil
	}
	if p.Request.Kind == api.Tokens {
		return &api.Place{Token: held * int(p.Score.BlockTokens)}
	}
	if p.Body.Buffer == nil || p.Request.Kind != api.Text {
		return nil
	}
	from := held * p.TextBlock
	return new(api.Find(p.API, p.Body.Buffer.Data, from, from+p.TextBlock))
}

func difference(n *api.Place) string {
	where := fmt.Sprintf("byte %d of the prompt", n.Byte)
	switch {
	case n.Text == "":
		return fmt.Sprintf("The first difference to what is cached comes after token %d.", n.Token)
	case n.Message > 0:
		where = fmt.Sprintf("byte %d of message %d (%s)", n.Byte, n.Message, n.Role)
	case n.Role != "":
		where = fmt.Sprintf("byte %d of the %s", n.Byte, n.Role)
	}
	return fmt.Sprintf("The first difference to what is cached comes soon after %s: %q", where, strings.TrimSpace(n.Text))
}
