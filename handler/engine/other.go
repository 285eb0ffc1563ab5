package engine

import (
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// Other is a server of none of the other types.
const Other = "other"

// other may be anything. It gets ranks, which it may heed. It gets salts, too: it may
// refuse a salt, but cannot lose it silently.
var other = kind{
	name:      Other,
	takesRank: func(Info, string) bool { return true },
	salts:     salted{also: []string{api.NameChat, api.NameCompletions, api.NameResponses}, most: maxVLLMSalt},
	steers:    slices.Concat(rankSteering, prioritySteering),
}
