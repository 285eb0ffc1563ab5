package kubernetes

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Server is an API server that has nothing but EndpointSlices of one namespace.
type Server struct {
	*httptest.Server
	mu      sync.Mutex
	version int
	slices  map[string]*Slice
	history []event       // the last few changes
	changed chan struct{} // closed with the next change
	ending  string        // how the watches that are under way end
	down    bool
}

// event is a change, as a watch reports it.
type event struct {
	Type    string `json:"type"`
	Object  any    `json:"object"`
	version int
}

// remembered is how many changes a watch can begin before.
const remembered = 20

// StartServer starts a server without slices.
func StartServer() *Server {
	s := &Server{version: 1, slices: make(map[string]*Slice), changed: make(chan struct{})}
	s.Server = httptest.NewUnstartedServer(s)
	s.EnableHTTP2 = true
	s.StartTLS()
	return s
}

// CA returns the certificate in PEM.
func (s *Server) CA() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

// SetDown makes the server refuse each call with 503, and ends the watches; or ends that.
func (s *Server) SetDown(down bool) {
	s.mu.Lock()
	s.down = down
	s.mu.Unlock()
	s.EndWatches("")
}

// EndWatches ends the watches that are under way. Their last line is the text, unless it is empty.
func (s *Server) EndWatches(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = text
	s.version++
	s.history = nil // they find their version gone
	s.signal()
}

// signal wakes the watches. The caller holds the lock.
func (s *Server) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Server) change(kind string, e *Slice) {
	s.version++
	e.Metadata.ResourceVersion = strconv.Itoa(s.version)
	s.history = append(s.history, event{kind, e, s.version})
	s.history = s.history[max(0, len(s.history)-remembered):]
	s.signal()
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	down := s.down
	s.mu.Unlock()
	query := r.URL.Query()
	switch {
	case down:
		status(w, http.StatusServiceUnavailable)
	case r.Method != http.MethodGet:
		s.write(w, r)
	case query.Get("watch") == "true":
		since, _ := strconv.Atoi(query.Get("resourceVersion"))
		s.watch(w, r, since)
	default:
		s.mu.Lock()
		defer s.mu.Unlock()
		list := map[string]any{
			"kind": "EndpointSliceList", "metadata": map[string]string{"resourceVersion": strconv.Itoa(s.version)},
			"items": slices.Collect(maps.Values(s.slices)),
		}
		_ = json.NewEncoder(w).Encode(list)
	}
}

func (s *Server) write(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := path.Base(r.URL.Path)
	e := new(Slice)
	if r.Method != http.MethodDelete {
		if err := json.NewDecoder(r.Body).Decode(e); err != nil {
			status(w, http.StatusBadRequest)
			return
		}
		name = e.Metadata.Name
	}
	known := s.slices[name]
	switch {
	case r.Method == http.MethodPost && known != nil:
		status(w, http.StatusConflict)
	case r.Method != http.MethodPost && known == nil:
		status(w, http.StatusNotFound)
	case r.Method == http.MethodDelete:
		delete(s.slices, name)
		gone := *known
		s.change("DELETED", &gone)
	default:
		s.slices[name] = e
		s.change(map[bool]string{true: "ADDED", false: "MODIFIED"}[known == nil], e)
	}
}

// watch reports the changes after a version, and bookmarks in between.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, since int) {
	out := json.NewEncoder(w)
	_ = http.NewResponseController(w).Flush()
	for {
		s.mu.Lock()
		changed, now, history, ending := s.changed, s.version, s.history, s.ending
		s.mu.Unlock()
		if since < now && (len(history) == 0 || history[0].version > since+1) {
			if ending != "" {
				fmt.Fprintln(w, ending)
			}
			return
		}
		for _, e := range history {
			if e.version > since {
				_ = out.Encode(e)
			}
		}
		since = now
		_ = http.NewResponseController(w).Flush()
		select {
		case <-changed:
		case <-time.After(300 * time.Millisecond):
			mark := new(Slice)
			mark.Metadata.ResourceVersion = strconv.Itoa(now)
			_ = out.Encode(event{Type: "BOOKMARK", Object: mark})
		case <-r.Context().Done():
			return
		}
	}
}

func status(w http.ResponseWriter, code int) {
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","code":%d,"message":%q}`, code, http.StatusText(code))
}
