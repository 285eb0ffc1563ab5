package observe

import (
	"reflect"
	"testing"
	"time"

	"go.uber.org/zap"
	zapobserver "go.uber.org/zap/zaptest/observer"
)

func TestIncidentIsLoggedOnceAtEachEnd(t *testing.T) {
	core, logs := zapobserver.New(zap.InfoLevel)
	logger := zap.New(core)
	var in Incidents
	start := time.Unix(1000, 0)
	for i := range 100 {
		in.Raise(start.Add(time.Duration(i)*time.Second), "fallback oversized", func() *zap.Logger { return logger })
		in.End(start.Add(time.Duration(i)*time.Second), logger)
	}
	in.End(start.Add(99*time.Second+incidentEnd), logger)
	in.End(start.Add(time.Hour), logger)
	in.Raise(start.Add(time.Hour), "fallback oversized", func() *zap.Logger { return logger })
	var got []string
	for _, e := range logs.All() {
		got = append(got, e.Message+": "+e.ContextMap()["condition"].(string))
	}
	want := []string{
		"condition begins: fallback oversized",
		"condition is over: fallback oversized",
		"condition begins: fallback oversized",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("logged %q, want %q", got, want)
	}
	if n := logs.All()[1].ContextMap()["times"]; n != int64(100) {
		t.Errorf("the incident was met %v times, want 100", n)
	}
}

func TestConditionsThatNoLongerHoldAreOverAtOnce(t *testing.T) {
	core, logs := zapobserver.New(zap.InfoLevel)
	var in Incidents
	for _, holds := range [][]Warning{{{What: "a"}}, {{What: "a"}, {What: "b"}}, {{What: "b"}}, nil, nil} {
		in.Replace(time.Unix(1000, 0), holds, zap.New(core))
	}
	var got []string
	for _, e := range logs.All() {
		got = append(got, e.Message+": "+e.ContextMap()["condition"].(string))
	}
	if want := []string{"condition begins: a", "condition begins: b", "condition is over: a", "condition is over: b"}; !reflect.DeepEqual(got, want) {
		t.Errorf("logged %q, want %q", got, want)
	}
}
