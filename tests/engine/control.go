package engine

import (
	"encoding/json"
	"net/http"
	"time"
)

// controlHandler serves what demos ask of an engine from outside its process, also while
// it is killed:
//
//	POST /_engine/faults    a Fault; {} ends the present one
//	GET  /_engine/state     a State
//	POST /_engine/kill
//	POST /_engine/restart   ?down=DURATION: killed for so long before
func (e *Engine) controlHandler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, do func(*http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := do(r); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			json.NewEncoder(w).Encode(e.State()) //nolint:errcheck // the client may leave
		})
	}
	handle("POST /_engine/faults", func(r *http.Request) error {
		var f Fault
		if err := json.NewDecoder(r.Body).Decode(&f); err != nil {
			return err
		}
		return e.SetFault(f)
	})
	handle("GET /_engine/state", func(*http.Request) error { return nil })
	handle("POST /_engine/kill", func(*http.Request) error {
		e.Kill()
		return nil
	})
	handle("POST /_engine/restart", func(r *http.Request) error {
		down, err := time.ParseDuration(r.URL.Query().Get("down"))
		if r.URL.Query().Has("down") && err != nil {
			return err
		}
		e.Kill()
		time.Sleep(down)
		return e.Restart()
	})
	return mux
}
