package valkey

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/valkey-io/valkey-go"
)

// TestServersClockCounts trims a stream of a server whose clock is 20 minutes behind the router's.
func TestServersClockCounts(t *testing.T) {
	m := miniredis.RunT(t)
	m.SetTime(time.Now().Add(-20 * time.Minute))
	v, err := journal.DialValkey(valkey.ClientOption{InitAddress: []string{m.Addr()}}, "p:", "x")
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	for i := range uint64(100) {
		if err := v.Append(t.Context(), &journal.Sent{Router: 1, Number: i + 1, Epoch: 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := v.Trim(t.Context(), 1<<20); err != nil {
		t.Fatal(err)
	}
	n := 0
	if _, err := v.Read(t.Context(), "", 0, func(s *journal.Sent) { n += int(s.Epoch) }); err != nil || n != 100 { //nolint:gosec // 1
		t.Errorf("of 100 entries of the last second stay %d, %v", n, err)
	}
}
