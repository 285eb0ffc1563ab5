package main

import (
	"fmt"
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
	if engines[0].Events() != nil {
		t.Error("KV events without being asked for")
	}
	if _, err := start(o); err == nil {
		t.Error("an address in use was listened on")
	}
	o.controls = freeAddr(t)
	if _, err := start(o); err == nil {
		t.Error("one control address served two engines")
	}
}

// TestEventFlags has two engines of two ranks with consecutive ports and names of their own.
func TestEventFlags(t *testing.T) {
	o, err := parse([]string{
		"-events", "-ranks", "2", "-events-dial", "127.0.0.1:15000", "-events-replay-port", "0", "-events-private-hashes",
		"-events-topic", "kv", "-events-first", "1", "-events-encoding", "array", "-addr", freeAddr(t) + "," + freeAddr(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	engines, err := start(o)
	if err != nil {
		t.Fatal(err)
	}
	defer stop(engines)
	seeds := make(map[uint64]bool)
	for i, e := range engines {
		for rank, s := range e.Events() {
			if want := fmt.Sprintf("tcp://127.0.0.1:%d", 15000+2*i+rank); s.Endpoint != want || s.Replay == "" || s.Next != 1 {
				t.Errorf("%s rank %d: %+v", e.Name(), rank, s)
			}
		}
		c, err := o.events.of(i, 2)
		if err != nil {
			t.Fatal(err)
		}
		seeds[c.HashSeed] = true
	}
	if len(seeds) != 2 || seeds[0] {
		t.Errorf("seeds %v", seeds)
	}
	if o, _ := parse([]string{"-events", "-events-encoding", "x", "-addr", freeAddr(t)}); o != nil {
		if _, err := start(o); err == nil {
			t.Error("an unknown encoding was accepted")
		}
	}
}
