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
