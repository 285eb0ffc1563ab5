package worker

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestOthersLeaveSlots has other routers report requests, more than there can be.
func TestOthersLeaveSlots(t *testing.T) {
	for _, v := range []struct{ limit, others, want int64 }{
		{32, 0, 32}, {32, 20, 12}, {32, 28, 4}, {32, 300, 4}, {10, 300, 2}, {9, 300, 1}, {2, 300, 1}, {1, 300, 0}, {1, 0, 1},
	} {
		s, took := new(slots), int64(0)
		s.limit.Store(v.limit)
		s.others.Store(v.others)
		if got := s.FreeSlots(); got != v.want {
			t.Errorf("%+v: room for %d", v, got)
		}
		for s.TakeSlot() {
			took++
		}
		if took != v.want || s.FreeSlots() > 0 {
			t.Errorf("%+v: %d are taken, room for %d", v, took, s.FreeSlots())
		}
	}
}

func TestRequestLimitInJSON(t *testing.T) {
	for text, want := range map[string]RequestLimit{`0`: 0, `64`: 64, `"auto"`: LimitAuto} {
		var l RequestLimit
		err := json.Unmarshal([]byte(text), &l)
		if b, _ := json.Marshal(l); err != nil || l != want || string(b) != text {
			t.Errorf("%s is read as %v and written as %s, error %v", text, l, b, err)
		}
	}
	for _, text := range []string{`-1`, `-5`, `1.5`, `"64"`, `"all"`, `true`, `[]`} {
		var l RequestLimit
		if err := json.Unmarshal([]byte(text), &l); err == nil || !strings.Contains(err.Error(), "max_running: must be") || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: error %v", text, err)
		}
	}
}
