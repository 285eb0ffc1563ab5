package main

import (
	"net/http"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// freeAddr returns an address that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := canned.Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func TestFlags(t *testing.T) {
	a, b := freeAddr(t), freeAddr(t)
	o, err := parse([]string{"-addr", a + "," + b, "-lora", "x,y", "-ranks", "2", "-speed", "50", "-step-base", "4"})
	if err != nil {
		t.Fatal(err)
	}
	if o.cfg.Step.Base != 4 || o.cfg.Step.PerToken == 0 {
		t.Errorf("step model %+v", o.cfg.Step)
	}
	engines, err := start(o)
	if err != nil {
		t.Fatal(err)
	}
	defer stop(engines)
	for i, addr := range []string{a, b} {
		e := engines[i]
		if e.Addr() != addr || e.Name() != []string{"e1", "e2"}[i] || len(e.State().Ranks) != 2 {
			t.Errorf("engine %s at %s: %+v", e.Name(), e.Addr(), e.State())
		}
		resp, err := http.Get(e.URL() + "/health")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	if _, err := start(o); err == nil {
		t.Error("an address in use was listened on")
	}
	o.controls = freeAddr(t)
	if _, err := start(o); err == nil {
		t.Error("one control address served two engines")
	}
}
