package engine

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"
)

// controlHandler serves what tests and demos ask of an engine from outside its
// process:
//
//	POST /_engine/faults          a Fault; {} ends the present one
//	GET  /_engine/journal         {"records": [...]}; ?after=SEQ&limit=N
//	GET  /_engine/state           a State
//	GET  /_engine/events          {"ranks": [...]}, an EventState for each
//	POST /_engine/events/faults   an EventFault; {} ends those that go on
//	POST /_engine/events/holds    {"rank", "tokens", "lora", "salt"}; the answer is
//	                              {"device": BLOCKS, "host": BLOCKS}, see Holds
//	POST /_engine/kill
//	POST /_engine/restart         ?down=DURATION: killed for so long before
//
// An error is {"error": "..."} with 400, or 500 if the engine could not do it.
func (e *Engine) controlHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /_engine/faults", func(w http.ResponseWriter, r *http.Request) {
		var f Fault
		if err := decodeControl(w, r, &f, 1<<16); err != nil {
			controlError(w, http.StatusBadRequest, err)
			return
		}
		if err := e.SetFault(f); err != nil {
			controlError(w, http.StatusBadRequest, err)
			return
		}
		control(w, http.StatusOK, e.State())
	})
	mux.HandleFunc("GET /_engine/journal", e.controlJournal)
	mux.HandleFunc("GET /_engine/state", func(w http.ResponseWriter, _ *http.Request) {
		control(w, http.StatusOK, e.State())
	})
	mux.HandleFunc("POST /_engine/kill", func(w http.ResponseWriter, _ *http.Request) {
		e.Kill()
		control(w, http.StatusOK, e.State())
	})
	mux.HandleFunc("POST /_engine/restart", e.controlRestart)
	mux.HandleFunc("GET /_engine/events", e.controlEvents)
	mux.HandleFunc("POST /_engine/events/faults", e.controlEventFault)
	mux.HandleFunc("POST /_engine/events/holds", e.controlHolds)
	return mux
}

func (e *Engine) controlJournal(w http.ResponseWriter, r *http.Request) {
	after, limit := uint64(0), e.cfg.JournalSize
	q := r.URL.Query()
	if s := q.Get("after"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			controlError(w, http.StatusBadRequest, err)
			return
		}
		after = n
	}
	if s := q.Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			controlError(w, http.StatusBadRequest, err)
			return
		}
		limit = n
	}
	control(w, http.StatusOK, map[string]any{"records": e.journal.after(after, limit)})
}

func (e *Engine) controlRestart(w http.ResponseWriter, r *http.Request) {
	if s := r.URL.Query().Get("down"); s != "" {
		down, err := time.ParseDuration(s)
		if err != nil {
			controlError(w, http.StatusBadRequest, err)
			return
		}
		e.Kill()
		select {
		case <-time.After(down):
		case <-r.Context().Done():
		}
	}
	if err := e.Restart(); err != nil {
		controlError(w, http.StatusInternalServerError, err)
		return
	}
	control(w, http.StatusOK, e.State())
}

// decodeControl reads a body of at most so many bytes; an empty one changes nothing.
func decodeControl(w http.ResponseWriter, r *http.Request, v any, most int64) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, most))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

func control(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v) //nolint:errcheck // the client may leave
}

func controlError(w http.ResponseWriter, status int, err error) {
	control(w, status, map[string]string{"error": err.Error()})
}
