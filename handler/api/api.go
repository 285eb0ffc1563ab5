package api

import "strings"

// API is one of the clients' APIs. It is what For returns; the method set is
// closed, because a request's reading and an answer's observing belong to one
// another.
type API interface {
	// Name is short, constant and fit for a metric label: "chat",
	// "completions".
	Name() string

	// field notes where a top-level member is that only this API knows. Of
	// members of one name the last counts, as in the engines.
	field(p *parse, key []byte, v span)
	// prompt reads what field has noted into the request.
	prompt(p *parse)
	// begin writes what stands between a prompt and the text that answers it.
	begin(a *Answer)
	// choice reads the object at b[i], an element of an answer's or chunk's
	// choices, and returns the index behind it, or -1 if it is malformed.
	choice(a *Answer, b []byte, i int) int
}

// apis lists what For knows. Of two suffixes that both fit, the first wins.
var apis = [...]struct {
	suffix string
	api    API
}{
	{"/chat/completions", chat{}},
	{"/completions", completions{}},
}

// For returns the API that a request path belongs to, whatever comes before
// it (/v1, /openai/v1, nothing), or nil if it is no inference request. The
// method is the caller's to check.
func For(path string) API {
	for i := range apis {
		if strings.HasSuffix(path, apis[i].suffix) {
			return apis[i].api
		}
	}
	return nil
}
