package events

import (
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// recorded is a request of a recording.
type recorded struct {
	text      string
	ticket    cache.Ticket
	predicted cache.Overlap
}

// recording plays what a real engine and its clients did to caches.
type recording struct {
	t      *testing.T
	caches *cache.Caches
	slot   *cache.Slot
	from   *Recorder
	size   int
	named  bool // the events have the names of the requests' sessions
	kinds  [cache.Kinds]int32
	asked  map[string]*recorded
}

func (r *recording) prompt(text string) *cache.Prompt {
	const block = 64
	p := &cache.Prompt{
		Root: 7, Weights: cache.Weights{Kinds: &r.kinds}, BlockTokens: 27, Tokens: int64(len(text)) * 27 / block,
		Identities: []cache.Identity{{BlockTokens: r.size, Root: cache.IdentityRoot(applySeed, r.size, "", "")}},
	}
	for ; len(text) >= block; text = text[block:] {
		p.Blocks = append(p.Blocks, xxh3.HashString(text[:block])&^cache.KindMask)
	}
	p.Past = float32(len(text)) / block
	return p
}

// play takes one line. It returns what was predicted and reported of a request that has ended.
func (r *recording) play(at time.Time, line string) (name string, predicted cache.Overlap, reported int64) {
	r.caches.Expire(at)
	what, rest, _ := strings.Cut(line, " ")
	if what == "batch" {
		payload, err := hex.DecodeString(rest)
		if err != nil {
			r.t.Fatal(err)
		}
		r.from.Payload(0, payload)
		return "", predicted, 0
	}
	name, rest, _ = strings.Cut(rest, " ")
	q := r.asked[name]
	switch what {
	case "ask":
		q = new(recorded)
		r.asked[name] = q
		if err := json.Unmarshal([]byte(rest), &q.text); err != nil {
			r.t.Fatal(err)
		}
		p, v := r.prompt(q.text), new(cache.View)
		r.caches.Look(at, p, v)
		q.predicted = v.Of(r.slot)
		r.caches.Book(at, &q.ticket, r.slot, p, v)
		if r.named {
			q.ticket.Named("kvr-" + name)
		}
	case "first":
		q.ticket.Computed(at)
	case "end":
		f := strings.SplitN(rest, " ", 4)
		var n [3]int64
		for i := range n {
			n[i], _ = strconv.ParseInt(f[i], 10, 64)
		}
		var answer string
		if err := json.Unmarshal([]byte(f[3]), &answer); err != nil {
			r.t.Fatal(err)
		}
		whole := r.prompt(q.text + answer)
		q.ticket.End(time.Time{}, true, whole.Blocks, cache.Counts{
			Prompt: n[0], Cached: n[1], CachedReported: true, Answer: n[0] + n[2], AnswerPast: whole.Past,
		})
		return name, q.predicted, n[1]
	}
	return "", predicted, 0
}

// TestTextOfRealEngines plays recordings of real engines. The first prompts are new; of later ones,
// the caches predict what the engine has reported.
func TestTextOfRealEngines(t *testing.T) {
	for name, c := range map[string]struct {
		engine Engine
		unlike map[string]int64 // tokens by which predictions may be wrong, for a reason
	}{
		"vllm": {Engine{BlockTokens: 32, Adapters: true, Salts: true, HitsInFlight: true}, map[string]int64{
			"b1": 32,           // nothing has parted from the first text yet: the border is estimated
			"c2": 32, "c3": 32, // new, and under way
			"b3": math.MaxInt64, // the engine reports its reset with this request's own events
		}},
		"sglang": {Engine{BlockTokens: 16, Salts: true}, map[string]int64{
			"b1": 16,
			"c2": math.MaxInt64, "c3": math.MaxInt64, // the engine reuses no prefill that is under way
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := &recording{t: t, size: c.engine.BlockTokens, named: name == "vllm", asked: make(map[string]*recorded)}
			r.caches = cache.New(1<<20, r.size)
			for i := range r.kinds {
				r.kinds[i] = 27_000
			}
			r.slot = r.caches.Open(cache.Target{Worker: 1}, 20_000)
			w := NewWorker(r.caches, applySeed, 1, 1, c.engine)
			defer w.Close()
			r.from = w.Recorder(0)
			r.from.State(Live, true)
			data, err := os.ReadFile("testdata/text-" + name + ".txt")
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(data)) {
				ms, what, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
				n, err := strconv.ParseInt(ms, 10, 64)
				if err != nil {
					continue // a comment
				}
				asked, predicted, reported := r.play(time.UnixMilli(1_000_000+n), what)
				may := c.unlike[asked] // by so many tokens
				if off := predicted.OverlapTokens - reported; asked != "" && (off > may || -off > may) {
					t.Errorf("%s: %d tokens predicted (%s), %d reported", asked, predicted.OverlapTokens, predicted.Knowledge, reported)
				}
			}
		})
	}
}
