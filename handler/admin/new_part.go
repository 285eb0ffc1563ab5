package admin

import (
	"fmt"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// newPart is where a prompt begins that no candidate has cached, to a block. It may be new, or have been
// evicted.
type newPart struct {
	// Token is the place in a prompt of token ids.
	Token int `json:"token,omitzero"`
	// Message is the number of the message, from 1; 0 in a prompt without messages. Tools precede them.
	Message int    `json:"message,omitzero"`
	Role    string `json:"role,omitzero"`
	// Byte is the place in the message, or in the prompt.
	Byte int `json:"byte"`
	// Text is the beginning of the new part.
	Text string `json:"text,omitzero"`
}

// newIn returns where a prompt is new to all candidates. It is nil if it is not new, or is unknown.
func newIn(p *plan.Plan, candidates []kvscore.Candidate) *newPart {
	held := 0
	for i := range candidates {
		held = max(held, candidates[i].HeldBlocks)
	}
	if p.Request == nil || held >= len(p.Score.Blocks) {
		return nil
	}
	if p.Request.Kind == api.Tokens {
		return &newPart{Token: held * int(p.Score.BlockTokens)}
	}
	if p.Body.Buffer == nil || p.Request.Kind != api.Text {
		return nil
	}
	from := held * p.TextBlock
	at := api.Find(p.API, p.Body.Buffer.Data, from, from+p.TextBlock)
	return &newPart{Message: at.Message, Role: at.Role, Byte: at.Byte, Text: at.Text}
}

// String says it in words.
func (n *newPart) String() string {
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
