package engine

import "encoding/json"

// lenient is a member that may be any JSON: what does not have the expected form is
// ignored, not refused.
type lenient struct{ json.RawMessage }

// text returns the member if it is a text, else none.
func (l lenient) text() (s string) {
	if json.Unmarshal(l.RawMessage, &s) != nil {
		return ""
	}
	return s
}

// reportsHits returns whether the request has a vLLM tell of the blocks that it hits.
func (r *request) reportsHits() bool {
	var args map[string]any
	return json.Unmarshal(r.XArgs.RawMessage, &args) == nil && args["kv_cache_report_mode"] == "full"
}
