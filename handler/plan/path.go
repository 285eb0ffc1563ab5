package plan

import (
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// responseNamed returns the id of the response that a request names in its
// path, to get, cancel or delete it, empty if it names none.
func responseNamed(r *http.Request) string {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete:
	default:
		return ""
	}
	before, rest, ok := strings.Cut(r.URL.Path, "/responses/")
	if !ok || api.For(before+"/responses") == nil {
		return ""
	}
	id, _, _ := strings.Cut(rest, "/")
	return id
}

// modelOf returns the model that a request for one model's card names.
func modelOf(r *http.Request) string {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return ""
	}
	if _, id, ok := strings.Cut(r.URL.Path, "/models/"); ok {
		return id
	}
	return ""
}

// listsModels tells whether a request asks for the list of models.
func listsModels(r *http.Request) bool {
	return r.Method == http.MethodGet && (r.URL.Path == "/models" || strings.HasSuffix(r.URL.Path, "/v1/models"))
}
