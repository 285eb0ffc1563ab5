package pool

import (
	"slices"
	"testing"
)

func TestUnnamedPoolsAreComparedByUpstream(t *testing.T) {
	var s SharedSettings
	for _, v := range []struct {
		upstreams, unrelated []string
	}{
		{[]string{"a:1", "b:1"}, nil},
		{[]string{"b:1"}, nil},
		{[]string{"c:1", "a:1"}, nil},
		{[]string{"d:1"}, []string{"a:1", "b:1", "c:1"}},
		{[]string{"c:1", "d:1"}, nil},
	} {
		if got := s.MeetUnnamed(v.upstreams); !slices.Equal(got, v.unrelated) {
			t.Errorf("%v is unrelated to %v, want %v", v.upstreams, got, v.unrelated)
		}
	}
}
