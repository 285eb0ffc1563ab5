package pool

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
)

// TestEventsAreOfTheLog writes log lines, and looks at the events.
func TestEventsAreOfTheLog(t *testing.T) {
	p := &registry{Name: "test", events: make(chan event, 1)}
	log := p.Logger()
	log.Info("worker is well")
	log.Debug("condition begins")
	for range 3 { // more than have room
		log.Warn("worker is marked down", zap.String("upstream", "a:1"))
	}
	e := <-p.events
	if e.name != "kv_router_worker_marked_down" || e.data["pool"] != p.Name || e.data["upstream"] != "a:1" || len(p.events) != 0 {
		t.Errorf("got %+v", e)
	}
}

// TestEventsHaveLogLines looks for the log lines of all events in the code.
func TestEventsHaveLogLines(t *testing.T) {
	var code strings.Builder
	files, _ := filepath.Glob("../*/*.go")
	for _, name := range files {
		if !strings.HasSuffix(name, "_test.go") && filepath.Base(name) != "events.go" {
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			code.Write(data)
		}
	}
	for line := range events {
		if !strings.Contains(code.String(), `"`+line+`"`) {
			t.Errorf("no code logs %q", line)
		}
	}
}
