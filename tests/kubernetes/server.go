// Package kubernetes has a small Kubernetes API server for tests. It lists EndpointSlices, and has
// them watched.
package kubernetes

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Slice is an EndpointSlice with one pod.
type Slice struct {
	Metadata struct {
		Name            string `json:"name"`
		ResourceVersion string `json:"resourceVersion,omitempty"`
	} `json:"metadata"`
	AddressType string     `json:"addressType"`
	Endpoints   []Endpoint `json:"endpoints"`
	Ports       []Port     `json:"ports"`
}

// Endpoint is one pod of a slice.
type Endpoint struct {
	Addresses  []string  `json:"addresses"`
	Conditions Condition `json:"conditions"`
	TargetRef  struct {
		Kind string `json:"kind"`
		Name string `json:"name"`
		UID  string `json:"uid"`
	} `json:"targetRef"`
}

// Condition is the state of a pod.
type Condition struct {
	Ready       bool `json:"ready"`
	Serving     bool `json:"serving"`
	Terminating bool `json:"terminating"`
}

// The states of a pod in the order of its life.
var (
	Loading     = Condition{}
	Ready       = Condition{Ready: true, Serving: true}
	Terminating = Condition{Serving: true, Terminating: true}
)

// Port is a port of the pods of a slice.
type Port struct {
	Name     string `json:"name"`
	Port     int    `json:"port"`
	Protocol string `json:"protocol"`
}

// Server is an API server that has nothing but EndpointSlices of one namespace.
type Server struct {
	*httptest.Server
	mu      sync.Mutex
	version int
	slices  map[string]*Slice
	history []event       // the last few changes
	changed chan struct{} // closed with the next change
	ending  string        // how the watches that are under way end
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
	if query := r.URL.Query(); query.Get("watch") == "true" {
		since, _ := strconv.Atoi(query.Get("resourceVersion"))
		s.watch(w, r, since)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = json.NewEncoder(w).Encode(map[string]any{
		"kind": "EndpointSliceList", "metadata": map[string]string{"resourceVersion": strconv.Itoa(s.version)},
		"items": slices.Collect(maps.Values(s.slices)),
	})
}

// Set makes a slice of a pod, or changes it. It has the name of the pod.
func (s *Server) Set(pod, address string, port int, state Condition) {
	e := Endpoint{Addresses: []string{address}, Conditions: state}
	e.TargetRef.Kind, e.TargetRef.Name, e.TargetRef.UID = "Pod", pod, "uid-"+pod
	slice := &Slice{AddressType: "IPv4", Endpoints: []Endpoint{e}, Ports: []Port{{"http", port, "TCP"}}}
	slice.Metadata.Name = pod
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.slices[pod] != nil
	s.slices[pod] = slice
	s.change(map[bool]string{false: "ADDED", true: "MODIFIED"}[known], slice)
}

// Delete deletes the slice of a pod.
func (s *Server) Delete(pod string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.slices[pod]; known != nil {
		delete(s.slices, pod)
		gone := *known
		s.change("DELETED", &gone)
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
