package pool

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2"
)

const minute, hour = caddy.Duration(time.Minute), caddy.Duration(time.Hour)

// wanted returns settings of workers, and of nothing else.
func wanted(workers ...worker.Settings) *Settings {
	s := &Settings{Workers: make(map[string]worker.Settings), Upstreams: make(map[string]bool)}
	for _, w := range workers {
		s.Workers[w.Dial] = w
		if w.Dial != worker.AllWorkers {
			s.Upstreams[w.Dial] = true
		}
	}
	return s
}

// TestMergeFillsInWhatOneLeavesOpen merges both ways.
func TestMergeFillsInWhatOneLeavesOpen(t *testing.T) {
	a := wanted(worker.Settings{Dial: "a:1", ID: 7}, worker.Settings{Dial: "b:1", KVTokens: 300}, worker.Settings{Dial: worker.AllWorkers, KVTokens: 100})
	a.Memory, a.TTL = 8<<20, minute
	b := wanted(worker.Settings{Dial: "b:1", ID: 9}, worker.Settings{Dial: "c:1", ID: 10})
	b.BlockSize, b.TextBlock, b.MaxSessions, b.TTL = 32, 128, 11, minute
	want := wanted(worker.Settings{Dial: "a:1", ID: 7}, worker.Settings{Dial: "b:1", ID: 9, KVTokens: 300}, worker.Settings{Dial: "c:1", ID: 10}, worker.Settings{Dial: worker.AllWorkers, KVTokens: 100})
	want.Memory, want.BlockSize, want.TextBlock, want.TTL, want.MaxSessions = 8<<20, 32, 128, minute, 11
	for _, pair := range [][2]*Settings{{a, b}, {b, a}} {
		got, err := pair[0].merge(pair[1])
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if len(a.Workers) != 3 || len(a.Upstreams) != 2 || a.BlockSize != 0 {
		t.Errorf("merging changed what it merged: %+v", a)
	}
	if w := want.Worker("b:1"); w.ID != 9 || w.KVTokens != 300 {
		t.Errorf("b:1 is %+v", w)
	}
	if w := want.Worker("d:1"); w.ID != worker.DerivedID("d:1") || w.KVTokens != 100 {
		t.Errorf("d:1 is %+v, want a derived id and the room of all", w)
	}
}

// TestContradictionsAreNamed merges what cannot both be.
func TestContradictionsAreNamed(t *testing.T) {
	for _, v := range []struct {
		a, b *Settings
		want []string
	}{
		{wanted(worker.Settings{Dial: "a:1", Priority: "on"}), wanted(worker.Settings{Dial: "a:1", Priority: "off"}), []string{"worker a:1 priority", "on", "off"}},
		{wanted(worker.Settings{Dial: "a:1", APIKey: "s3cret"}), wanted(worker.Settings{Dial: "a:1", APIKey: "other"}), []string{"worker a:1 api_key"}},
		{&Settings{Index: Index{Memory: 5 << 20}}, &Settings{Index: Index{Memory: 6 << 20}}, []string{"index memory", "5242880", "6291456"}},
		{&Settings{Sessions: Sessions{TTL: minute}}, &Settings{Sessions: Sessions{TTL: hour}}, []string{"affinity ttl", "1m0s", "1h0m0s"}},
		{wanted(worker.Settings{Dial: "a:1", ID: 7}), wanted(worker.Settings{Dial: "b:1", ID: 7}), []string{"a:1", "b:1", "id: must be unique, got 7"}},
		{&Settings{Sessions: Sessions{TTL: minute}, Index: Index{BlockSize: 16}}, &Settings{Sessions: Sessions{TTL: hour}, Index: Index{BlockSize: 32}}, []string{"ttl", "block_size"}},
	} {
		for _, pair := range [][2]*Settings{{v.a, v.b}, {v.b, v.a}} {
			_, err := pair[0].merge(pair[1])
			if err == nil {
				t.Errorf("%q: no error", v.want)
				continue
			}
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error %q has a secret", err)
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
	dynamic := wanted(worker.Settings{Dial: "a:1", ID: 7}, worker.Settings{Dial: "b:1", ID: 7})
	clear(dynamic.Upstreams)
	for _, v := range []struct {
		name string
		s    *Settings
		bad  bool
	}{
		{"Different", wanted(worker.Settings{Dial: "a:1", ID: 7}, worker.Settings{Dial: "b:1", ID: 8}, worker.Settings{Dial: "c:1"}), false},
		{"Same", wanted(worker.Settings{Dial: "a:1", ID: 7}, worker.Settings{Dial: "b:1", ID: 7}), true},
		{"DerivedOfAnother", wanted(worker.Settings{Dial: "a:1", ID: worker.DerivedID("b:1")}, worker.Settings{Dial: "b:1"}), true},
		{"Dynamic", dynamic, true},
		{"None", wanted(), false},
	} {
		if err := v.s.CheckIDs(); (err != nil) != v.bad {
			t.Errorf("%s: error %v", v.name, err)
		}
	}
}

// TestSettingsOfEngines has those that are refused, with field and value.
func TestSettingsOfEngines(t *testing.T) {
	for _, v := range []struct {
		w    worker.Settings
		want string
	}{
		{worker.Settings{Dial: "a:1", Priority: "on", ThinkingBudget: "auto", DynamoInstanceID: 1}, ""},
		{worker.Settings{Dial: worker.AllWorkers, Priority: "off"}, ""},
		{worker.Settings{Dial: "a:1", Priority: "true"}, `priority: must be on, off or auto, got "true"`},
		{worker.Settings{Dial: "a:1", CacheSalt: "yes"}, `cache_salt: must be on, off or auto, got "yes"`},
		{worker.Settings{Dial: "a:1", ThinkingBudget: "1"}, `thinking_budget: must be on, off or auto, got "1"`},
		{worker.Settings{Dial: "a:1", Role: "draft"}, `role: must be both, prefill, decode or backup, got "draft"`},
		{worker.Settings{Dial: "a:1", Role: "backup", Models: []string{"m"}, Headers: map[string]string{"X": "y"}}, ""},
		{worker.Settings{Dial: "a:1", Role: "backup"}, "role: a backup needs models"},
		{worker.Settings{Dial: worker.AllWorkers, Role: "backup", Models: []string{"m"}}, "role: worker * cannot be a backup"},
		{worker.Settings{Dial: "a:1", Role: "backup", Models: []string{"m"}, APIKey: "k"}, "api_key: a backup gets no requests of the router's own; use header Authorization"},
		{worker.Settings{Dial: "a:1", Headers: map[string]string{"X": "y"}}, "header, match and model: only a worker with role backup can have them"},
		{worker.Settings{Dial: "a:1", Role: "backup", Models: []string{"m"}, Headers: map[string]string{"X": "y\r\nZ: 1"}}, `header: must have a valid name and value, got the name "X"`},
		{worker.Settings{Dial: worker.AllWorkers, DynamoInstanceID: 7}, "dynamo_instance_id: must be unique, so worker * cannot have one, got 7"},
	} {
		err := v.w.Check()
		if (err == nil) != (v.want == "") || err != nil && err.Error() != v.want {
			t.Errorf("%+v: %v, want %q", v.w, err, v.want)
		}
	}
	s := wanted(worker.Settings{Dial: worker.AllWorkers, Priority: "on", ThinkingBudget: "on", CacheSalt: "on"}, worker.Settings{Dial: "a:1", Priority: "off"}).WithDefaults()
	if w := s.Worker("a:1"); w.Priority != "off" || w.ThinkingBudget != "on" || w.CacheSalt != "on" {
		t.Errorf("a:1 is %+v", w)
	}
	s = wanted(worker.Settings{Dial: worker.AllWorkers, Drain: new(true)}, worker.Settings{Dial: "a:1", Drain: new(false)}, worker.Settings{Dial: "b:1"}).WithDefaults()
	if a, b := worker.New("test", s.Worker("a:1")), worker.New("test", s.Worker("b:1")); a.Draining() || !b.Draining() {
		t.Errorf("a:1 drains %v, b:1 %v; want the opposite", a.Draining(), b.Draining())
	}
}

func TestSettingsOfKVEventsThatAreWrong(t *testing.T) {
	for text, set := range map[string]worker.KVEventsSettings{
		`"on"`:                   {Source: "on"},
		`"70000"`:                {Source: "70000"},
		`"tcp://host"`:           {Source: "tcp://host"},
		`"tcp://*:5557"`:         {Source: "tcp://*:5557"},
		`"ipc://"`:               {Source: "ipc://"},
		`replay: must be a port`: {Replay: "tcp:1"},
		`off has no replay`:      {Source: "off", Replay: "1"},
	} {
		if err := set.Check(false); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%+v: %v, want %s", set, err, text)
		}
	}
	shared := worker.KVEventsSettings{Source: "tcp://host:1"}
	if err := shared.Check(true); err == nil || !strings.Contains(err.Error(), "cannot share an endpoint") {
		t.Errorf("%v", err)
	}
}

func TestShareOptions(t *testing.T) {
	t.Setenv("SHARE_PASSWORD", "s3cret")
	for _, c := range []struct {
		share Share
		err   string // a part of it
		addrs []string
	}{
		{share: Share{}},
		{share: Share{Servers: []string{"redis://a"}}, addrs: []string{"a:6379"}},
		{share: Share{Servers: []string{"valkeys://u:p@a:1/2", "rediss://b:2"}, CA: "/none"}, addrs: []string{"a:1", "b:2"}},
		{share: Share{Servers: []string{"valkey://[::1]:7"}, Password: "{env.SHARE_PASSWORD}"}, addrs: []string{"[::1]:7"}},
		{share: Share{Prefix: "x"}, err: "the address of a server is missing"},
		{share: Share{Servers: []string{"http://a"}}, err: "server 1: must be like valkey://"},
		{share: Share{Servers: []string{"redis://a", "redis://u:s3cret@b:x/0"}}, err: "server 2: must be like valkey://"},
		{share: Share{Servers: []string{"redis://:s3cret/def@host:6379/0"}}, err: "escape special characters"},
		{share: Share{Servers: []string{"redis://a", "rediss://b"}}, err: "TLS"},
		{share: Share{Servers: []string{"redis://a"}, CA: "/none"}, err: "tls_ca"},
		{share: Share{Servers: []string{"rediss://a"}, Cert: "/none"}, err: "tls_cert and tls_key"},
	} {
		err := c.share.check()
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || strings.Contains(err.Error(), "s3cret")) {
			t.Errorf("%+v: %v, want %q", c.share, err, c.err)
			continue
		}
		if o, _ := c.share.options(false); c.err == "" && !slices.Equal(o.InitAddress, c.addrs) {
			t.Errorf("%+v: %v", c.share, o.InitAddress)
		}
	}
	s := Share{Servers: []string{"redis://u:p@a"}, Username: "me", Password: "{env.SHARE_PASSWORD}"}
	if o, err := s.options(true); err != nil || o.Username != "me" || o.Password != "s3cret" {
		t.Errorf("%q, %q, %v", o.Username, o.Password, err)
	}
	s = Share{Servers: []string{"rediss://a"}, CA: "/does/not/exist"}
	if _, err := s.options(true); err == nil || !strings.Contains(err.Error(), "tls_ca") {
		t.Error(err)
	}
}
