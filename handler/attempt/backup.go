package attempt

import (
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"

	"github.com/caddyserver/caddy/v2"
)

// forBackups are the client's headers that a backup gets. All others may have keys of the client or of the
// engines, or say who asks.
var forBackups = []string{
	"Accept", "Accept-Encoding", "Content-Encoding", "Content-Length", "Content-Type", "User-Agent",
	"Anthropic-Beta", "Anthropic-Version", "Openai-Beta",
	"Idempotency-Key", // for net/http, see Build
}

// toBackup returns a request as a backup gets it: with few of its headers, without its query, and with
// the operator's headers for that backup.
func toBackup(req *http.Request, set map[string]string) *http.Request {
	out, at := *req, *req.URL
	out.Trailer = nil
	at.RawQuery, at.ForceQuery = "", false
	out.URL, out.Header = &at, make(http.Header)
	for _, name := range forBackups {
		if values, there := req.Header[name]; there {
			out.Header[name] = values
		}
	}
	repl, _ := req.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	for name, value := range set {
		if value = repl.ReplaceAll(value, ""); strings.EqualFold(name, "Host") {
			out.Host = value
		} else {
			out.Header.Set(name, value)
		}
	}
	return &out
}

// fromBackups are the headers of a backup's answer that the client gets. All others may be about the router's
// account there, or set cookies.
var fromBackups = []string{
	"Cache-Control", "Content-Encoding", "Content-Language", "Content-Length", "Content-Type", "Retry-After", "Www-Authenticate",
	"Request-Id", "X-Request-Id",
}

func fromBackup(resp *http.Response) {
	maps.DeleteFunc(resp.Header, func(name string, _ []string) bool { return !slices.Contains(fromBackups, name) })
	resp.Trailer = nil
}

// editForBackup leaves out of a body what is only for engines of the operator, and leaves one name of the model.
func editForBackup(edit *api.Editor) {
	edit.Cut("cache_salt")
	if v := edit.Value(memberModel); v != nil {
		edit.Set(memberModel, v)
	}
}

// Disowns returns whether a backup refuses a request because of an account there: its key, its credit or its
// rate. Such an answer is not for clients, unless the account is theirs.
func Disowns(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusPaymentRequired, http.StatusForbidden:
		return true
	}
	return Retryable(status)
}

// TheirKey returns whether a backup of these headers gets a key that depends on the request, such as the client's own.
func TheirKey(set map[string]string) bool {
	repl := caddy.NewReplacer() // which knows the environment and files
	for name, value := range set {
		name = strings.ToLower(name)
		if (name == "authorization" || strings.HasSuffix(name, "key")) && strings.Contains(repl.ReplaceKnown(value, ""), "{") {
			return true
		}
	}
	return false
}
