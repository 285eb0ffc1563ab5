package worker

import (
	"testing"
	"time"
)

// TestRestartsThatAreTold has one engine restart, and then several engines answer at its
// address.
func TestRestartsThatAreTold(t *testing.T) {
	w, life := new(probing), ""
	for i, c := range []struct {
		at                int // seconds
		life              string
		restarted, shared bool
	}{
		{0, "", false, false},
		{0, "a", false, false},
		{15, "a", false, false},
		{45, "b", true, false},
		{120, "c", true, false},
		{135, "d", true, true},
		{150, "c", true, true},
		{300, "e", true, false},
	} {
		restarted, shared := w.StartChanged(time.Unix(1e9+int64(c.at), 0), life, c.life)
		if life = c.life; restarted != c.restarted || shared != c.shared {
			t.Errorf("%d: after %q restarted: %v, shared: %v, want %+v", i, c.life, restarted, shared, c)
		}
	}
}

// TestTheSilentAreAskedLessAndLess asks as often as the engine is due in a day.
func TestTheSilentAreAskedLessAndLess(t *testing.T) {
	w := new(probing)
	asked := 0
	for t := time.Unix(1e9, 0); t.Before(time.Unix(1e9+86400, 0)); t = t.Add(ProbeEvery) {
		if w.ClaimDetection(t) {
			asked++
			w.Detected(t, false)
		}
	}
	if most := int(24*time.Hour/AskedLess) + 10; asked > most || asked < most/2 {
		t.Errorf("asked %d times in a day, want up to %d", asked, most)
	}
}
