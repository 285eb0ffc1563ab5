package events

import (
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

func FuzzDecode(f *testing.F) {
	for _, seed := range append(fixtures(f, "fixtures.txt"), fixtures(f, "vllm-events.txt")...) {
		f.Add(seed.payload)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		exact := make([]byte, len(payload)) // a read behind the end panics
		copy(exact, payload)
		var d Decoder
		b, err := d.Decode(exact)
		if err == nil {
			checkBatch(t, b, len(payload))
		}
		again, err2 := d.Decode(exact) // with what the decoder has learned
		if (err == nil) != (err2 == nil) {
			t.Fatalf("errors %v and then %v", err, err2)
		}
		if err2 == nil {
			checkBatch(t, again, len(payload))
			for n := range payload[:min(len(payload), 40)] {
				if _, err := d.Decode(exact[: len(payload)-1-n : len(payload)-1-n]); err != ErrNotBatch {
					t.Fatalf("without the last %d bytes it is still a batch", n+1)
				}
			}
		}
	})
}

// checkBatch checks what holds for each batch.
func checkBatch(t *testing.T, b *Batch, size int) {
	if b.Rank < -1 || len(b.Events) > maxEvents {
		t.Fatalf("rank %d, %d events", b.Rank, len(b.Events))
	}
	values := len(b.Events)
	for i := range b.Events {
		e := &b.Events[i]
		values += len(e.Hashes) + len(e.Tokens) + len(e.Extra)
		if e.Tier >= cache.Tiers || e.Kind < Stored || e.Kind > Cleared || (e.Kind == Cleared) != (len(e.Hashes) == 0) {
			t.Fatalf("event %d: kind %d, tier %d, %d hashes", i, e.Kind, e.Tier, len(e.Hashes))
		}
		if e.Tokens != nil && (len(e.Tokens) != len(e.Hashes)*e.BlockSize || e.BlockSize < 1) {
			t.Fatalf("event %d: %d tokens, %d blocks of %d", i, len(e.Tokens), len(e.Hashes), e.BlockSize)
		}
		if e.Kind != Stored && (e.Tokens != nil || e.Extra != nil || e.HasParent || e.BlockSize != 0) {
			t.Fatalf("event %d of kind %d has what only stores have", i, e.Kind)
		}
		for _, key := range e.Extra {
			if key.Block >= len(e.Hashes) || len(key.Key) > size {
				t.Fatalf("event %d: extra key %+v", i, key)
			}
		}
		if e.Extra != nil && len(e.Extra) == 0 || len(e.Salt) > maxText {
			t.Fatalf("event %d: %+v", i, e)
		}
	}
	if values > size {
		t.Fatalf("%d values from %d bytes", values, size)
	}
}
