package handler

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

// wanted returns settings of workers, and of nothing else.
func wanted(workers ...workerSettings) *poolSettings {
	s := &poolSettings{workers: make(map[string]workerSettings), upstreams: make(map[string]bool)}
	for _, w := range workers {
		s.workers[w.Dial] = w
		if w.Dial != allWorkers {
			s.upstreams[w.Dial] = true
		}
	}
	return s
}

// TestMergeFillsInWhatOneLeavesOpen merges both ways.
func TestMergeFillsInWhatOneLeavesOpen(t *testing.T) {
	a := wanted(workerSettings{Dial: "a:1", ID: 7}, workerSettings{Dial: "b:1", KVTokens: 300}, workerSettings{Dial: allWorkers, KVTokens: 100})
	a.memory, a.ttl = 8<<20, time.Minute
	b := wanted(workerSettings{Dial: "b:1", ID: 9}, workerSettings{Dial: "c:1", ID: 10})
	b.blockSize, b.textBlock, b.maxSessions, b.ttl = 32, 128, 11, time.Minute
	want := wanted(workerSettings{Dial: "a:1", ID: 7}, workerSettings{Dial: "b:1", ID: 9, KVTokens: 300}, workerSettings{Dial: "c:1", ID: 10}, workerSettings{Dial: allWorkers, KVTokens: 100})
	want.memory, want.blockSize, want.textBlock, want.ttl, want.maxSessions = 8<<20, 32, 128, time.Minute, 11
	for _, pair := range [][2]*poolSettings{{a, b}, {b, a}} {
		got, err := pair[0].merge(pair[1])
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if len(a.workers) != 3 || len(a.upstreams) != 2 || a.blockSize != 0 {
		t.Errorf("merging changed what it merged: %+v", a)
	}
	if w := want.worker("b:1"); w.ID != 9 || w.KVTokens != 300 {
		t.Errorf("b:1 is %+v", w)
	}
	if w := want.worker("d:1"); w.ID != derivedID("d:1") || w.KVTokens != 100 {
		t.Errorf("d:1 is %+v, want a derived id and the room of all", w)
	}
}

// TestContradictionsAreNamed merges what cannot both be.
func TestContradictionsAreNamed(t *testing.T) {
	for _, v := range []struct {
		a, b *poolSettings
		want []string
	}{
		{wanted(workerSettings{Dial: "a:1", Priority: "on"}), wanted(workerSettings{Dial: "a:1", Priority: "off"}), []string{"worker a:1 priority", "on", "off"}},
		{wanted(workerSettings{Dial: "a:1", CacheSalt: "on"}), wanted(workerSettings{Dial: "a:1", CacheSalt: "off"}), []string{"worker a:1 cache_salt", "on", "off"}},
		{wanted(workerSettings{Dial: "a:1", ThinkingBudget: "on"}), wanted(workerSettings{Dial: "a:1", ThinkingBudget: "off"}), []string{"worker a:1 thinking_budget", "on", "off"}},
		{wanted(workerSettings{Dial: "a:1", DynamoInstanceID: 5}), wanted(workerSettings{Dial: "a:1", DynamoInstanceID: 6}), []string{"worker a:1 dynamo_instance_id", "5", "6"}},
		{&poolSettings{memory: 5 << 20}, &poolSettings{memory: 6 << 20}, []string{"index memory", "5242880", "6291456"}},
		{&poolSettings{blockSize: 16}, &poolSettings{blockSize: 32}, []string{"index block_size", "16", "32"}},
		{&poolSettings{textBlock: 48}, &poolSettings{textBlock: 128}, []string{"index text_block", "48", "128"}},
		{&poolSettings{ttl: time.Minute}, &poolSettings{ttl: time.Hour}, []string{"affinity ttl", "1m0s", "1h0m0s"}},
		{&poolSettings{maxSessions: 5}, &poolSettings{maxSessions: 6}, []string{"affinity max_sessions", "5", "6"}},
		{wanted(workerSettings{Dial: "a:1", ID: 7}), wanted(workerSettings{Dial: "a:1", ID: 8}), []string{"worker a:1 id", "7", "8"}},
		{wanted(workerSettings{Dial: "a:1", KVTokens: 70}), wanted(workerSettings{Dial: "a:1", KVTokens: 80}), []string{"worker a:1 kv_tokens", "70", "80"}},
		{wanted(workerSettings{Dial: "a:1", ID: 7}), wanted(workerSettings{Dial: "b:1", ID: 7}), []string{"a:1", "b:1", "id 7"}},
		{&poolSettings{ttl: time.Minute, blockSize: 16}, &poolSettings{ttl: time.Hour, blockSize: 32}, []string{"ttl", "block_size"}},
	} {
		for _, pair := range [][2]*poolSettings{{v.a, v.b}, {v.b, v.a}} {
			_, err := pair[0].merge(pair[1])
			if err == nil {
				t.Errorf("%q: no error", v.want)
				continue
			}
			for _, part := range v.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("the error %q does not say %q", err, part)
				}
			}
		}
	}
}

// TestNoTwoWorkersHaveOneID checks the ids of one handler, derived ones too, and
// those of workers that come from a dynamic source.
func TestNoTwoWorkersHaveOneID(t *testing.T) {
	dynamic := wanted(workerSettings{Dial: "a:1", ID: 7}, workerSettings{Dial: "b:1", ID: 7})
	clear(dynamic.upstreams)
	for _, v := range []struct {
		name string
		s    *poolSettings
		bad  bool
	}{
		{"Different", wanted(workerSettings{Dial: "a:1", ID: 7}, workerSettings{Dial: "b:1", ID: 8}, workerSettings{Dial: "c:1"}), false},
		{"Same", wanted(workerSettings{Dial: "a:1", ID: 7}, workerSettings{Dial: "b:1", ID: 7}), true},
		{"DerivedOfAnother", wanted(workerSettings{Dial: "a:1", ID: derivedID("b:1")}, workerSettings{Dial: "b:1"}), true},
		{"Dynamic", dynamic, true},
		{"None", wanted(), false},
	} {
		if err := v.s.checkIDs(); (err != nil) != v.bad {
			t.Errorf("%s: error %v", v.name, err)
		}
	}
}

// TestRefusedSettingsAreNotShared adds the settings of handlers one by one: one
// that contradicts leaves the others' as they are.
func TestRefusedSettingsAreNotShared(t *testing.T) {
	first := wanted(workerSettings{Dial: "a:1", ID: 7})
	first.textBlock = 32
	s := &sharedSettings{all: first}
	if err := s.add(wanted(workerSettings{Dial: "b:1", ID: 8})); err != nil {
		t.Fatal(err)
	}
	bad := wanted(workerSettings{Dial: "c:1", ID: 9})
	bad.textBlock, bad.blockSize = 64, 128
	if err := s.add(bad); err == nil {
		t.Error("a contradiction was added")
	}
	got := s.get()
	want := wanted(workerSettings{Dial: "a:1", ID: 7}, workerSettings{Dial: "b:1", ID: 8})
	want.textBlock = 32
	if !reflect.DeepEqual(got, want.withDefaults()) {
		t.Errorf("got %+v, want %+v", got, want.withDefaults())
	}
	if got.blockSize == 0 || got.memory == 0 || got.ttl != defaultTTL || got.maxSessions != defaultMaxSessions {
		t.Errorf("defaults are missing: %+v", got)
	}
}

// TestSettingsOfEngines has those that are refused, with field and value.
func TestSettingsOfEngines(t *testing.T) {
	for _, v := range []struct {
		w    workerSettings
		want string
	}{
		{workerSettings{Dial: "a:1", Priority: "on", ThinkingBudget: "auto", DynamoInstanceID: 1}, ""},
		{workerSettings{Dial: allWorkers, Priority: "off"}, ""},
		{workerSettings{Dial: "a:1", Priority: "true"}, `priority: must be on, off or auto, got "true"`},
		{workerSettings{Dial: "a:1", CacheSalt: "yes"}, `cache_salt: must be on, off or auto, got "yes"`},
		{workerSettings{Dial: "a:1", ThinkingBudget: "1"}, `thinking_budget: must be on, off or auto, got "1"`},
		{workerSettings{Dial: allWorkers, DynamoInstanceID: 7}, "dynamo_instance_id: 7 cannot be that of all workers"},
	} {
		err := v.w.errInvalid()
		if (err == nil) != (v.want == "") || err != nil && err.Error() != v.want {
			t.Errorf("%+v: %v, want %q", v.w, err, v.want)
		}
	}
	s := wanted(workerSettings{Dial: allWorkers, Priority: "on", ThinkingBudget: "on", CacheSalt: "on"}, workerSettings{Dial: "a:1", Priority: "off"}).withDefaults()
	if w := s.worker("a:1"); w.Priority != "off" || w.ThinkingBudget != "on" || w.CacheSalt != "on" {
		t.Errorf("a:1 is %+v", w)
	}
}
