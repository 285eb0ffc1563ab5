package pool

import (
	"strings"
	"testing"
)

func TestSettingsOfKVEventsThatAreWrong(t *testing.T) {
	for text, set := range map[string]KVEventsSettings{
		`"on"`:                   {Source: "on"},
		`"70000"`:                {Source: "70000"},
		`"tcp://host"`:           {Source: "tcp://host"},
		`"tcp://*:5557"`:         {Source: "tcp://*:5557"},
		`"ipc://"`:               {Source: "ipc://"},
		`replay: must be a port`: {Replay: "tcp:1"},
		`off has no replay`:      {Source: "off", Replay: "1"},
	} {
		if err := set.check(false); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%+v: %v, want %s", set, err, text)
		}
	}
	shared := KVEventsSettings{Source: "tcp://host:1"}
	if err := shared.check(true); err == nil || !strings.Contains(err.Error(), "cannot share an endpoint") {
		t.Errorf("%v", err)
	}
}
