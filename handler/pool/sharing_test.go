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

func TestIdleQueueIsNoticedOnce(t *testing.T) {
	for _, v := range []struct {
		waiting int
		limit   RequestLimit
		want    bool
	}{
		{0, 0, false},
		{10, 3, false},
		{10, LimitAuto, false},
		{10, 0, true},
	} {
		s := &SharedSettings{All: wanted(WorkerSettings{Dial: AllWorkers, MaxRunning: v.limit})}
		s.All.MaxWaiting = v.waiting
		if got := s.QueueIsIdle(); got != v.want {
			t.Errorf("%d may wait, limit %v: idle %v", v.waiting, v.limit, got)
		}
		if s.QueueIsIdle() {
			t.Error("it is noticed twice")
		}
	}
}
