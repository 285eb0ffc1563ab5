package tests

import (
	"net/http"
	"slices"
	"sync"
	"testing"
)

// swapper is an engine that loads one model at a time, on demand.
type swapper struct {
	*fake
	mu     sync.Mutex
	loaded string
	swaps  int
}

func startSwapper(t *testing.T, models ...string) *swapper {
	e := new(swapper)
	e.fake = startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.URL.Path == "/v1/models":
			lists(models...)(w, r)
			return true
		case r.Method == http.MethodPost:
			e.load(r.Header.Get("X-Model"))
		}
		return false
	})
	return e
}

func (e *swapper) load(model string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.loaded != model {
		e.loaded, e.swaps = model, e.swaps+1
	}
}

// TestModelsStayLoaded has two engines that load models on demand. Each keeps the model that it has.
func TestModelsStayLoaded(t *testing.T) {
	a, b := startSwapper(t, "x", "y"), startSwapper(t, "x", "y")
	s := startCaddy(t, "kv_router "+a.addr()+" "+b.addr())
	for i := range 24 {
		model := []string{"x", "y", "x"}[i%3]
		s.mustChat(t, askModel(model, i), "X-Model", model)
	}
	if got := []string{a.loaded, b.loaded}; a.swaps != 1 || b.swaps != 1 || !slices.Contains(got, "x") || !slices.Contains(got, "y") {
		t.Errorf("%d and %d loads, %v are loaded", a.swaps, b.swaps, got)
	}
}
