package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// Apply returns the body with the changes made: a copy. Nothing may be changed
// after it.
func (e *Editor) Apply() []byte {
	return rawjson.Splice(make([]byte, 0, len(e.body)+256), e.body, e.Edits())
}
