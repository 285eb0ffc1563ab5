package body

import (
	"io"
	"math/rand/v2"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// TestBodyIsSentWithChanges changes short and long bodies, and sends each twice
// and as it is.
func TestBodyIsSentWithChanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 4))
	for i := range 400 {
		body := noise(rng.IntN(100))
		if i%4 == 0 {
			body = noise(small + rng.IntN(2*small))
		}
		buf := bufferOf(body)
		b := NewReplay(buf, buf.Data)
		var edits []rawjson.Edit
		var want []byte
		at := 0
		for range rng.IntN(4) {
			start := at + rng.IntN(len(body)-at+1)
			end := start + rng.IntN(len(body)-start+1)
			e := rawjson.Edit{Span: rawjson.Span{Start: start, End: end}, Text: noise(rng.IntN(10))}
			if rng.IntN(4) == 0 {
				e.Text = buf.Data[rng.IntN(len(body)+1):]
			}
			want = append(append(want, body[at:start]...), e.Text...)
			edits, at = append(edits, e), end
		}
		want = append(want, body[at:]...)
		s, plain := b.Edit(edits), b.Edit(nil)
		for _, v := range []struct {
			s    Edited
			want string
		}{{s, string(want)}, {plain, string(body)}, {s, string(want)}} {
			r := v.s.Open()
			got, err := io.ReadAll(r)
			if err != nil || string(got) != v.want || v.s.Size != int64(len(got)) {
				t.Fatalf("sent %.80q, error %v, want %.80q", got, err, v.want)
			}
			r.Close()
		}
		b.Done()
		if n := b.users.Load(); n != 0 {
			t.Fatalf("%d users are left", n)
		}
	}
}
