package response

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Extras is the nvext that an answer carries for its client, and the values for it.
type Extras struct {
	Fields nvext.Fields
	Events []byte // the annotations, with which a stream begins
	IDs    []byte // the prompt's token ids as JSON; nil if unknown

	Worker          uint64 // the one that answers
	Rank            uint32
	Prefill         uint64 // the one that computes the prompt
	PrefillRank     uint32
	Waiting         uint64    // requests in the queue when the request came
	Received, Begun time.Time // the request, and the attempt that computes the prompt
	// Prefilled returns when another worker had computed the prompt, the zero time if it has
	// not; nil if there is no other.
	Prefilled func() time.Time
	HitRate   float64 // the predicted share of the prompt that was cached; negative if unknown
}

// added adds an answer's extras to it.
type added struct {
	before []byte           // annotations; nil once the client has them
	nvext  *nvext.Additions // nil for none
	plain  []byte           // a plain answer, until it is complete
	ids    bool             // the client has the token ids
}

// maxPlain is the longest plain answer that is kept to be changed, in bytes. An engine sends it in one piece.
const maxPlain = 16 << 20

// additions returns what adds the extras to the answer; nil if there are none.
func (b *Body) additions() *added {
	x := b.Extras
	if x == nil {
		return nil
	}
	e, add := new(added), nvext.Additions{}
	if x.Fields&nvext.FieldWorkerID != 0 {
		add.Each = []nvext.Member{nvext.MemberOf(nvext.NameWorkerID, nvext.Workers{
			PrefillWorker: x.Prefill, PrefillRank: x.PrefillRank, DecodeWorker: x.Worker, DecodeRank: x.Rank,
		})}
	}
	if x.Fields&(nvext.FieldTiming|nvext.FieldTokenIDs) != 0 {
		add.Final = b.finalMembers
	}
	if b.Stream {
		e.before = x.Events
	}
	if x.Fields != 0 {
		e.nvext = &add
	}
	if e.before == nil && e.nvext == nil {
		return nil
	}
	return e
}

// finalMembers returns the members that only the end of an answer carries.
func (b *Body) finalMembers() (list []nvext.Member) {
	x := b.Extras
	if x.Fields&nvext.FieldTiming != 0 {
		list = append(list, nvext.MemberOf(nvext.NameTiming, b.timing()))
	}
	if x.Fields&nvext.FieldTokenIDs != 0 && x.IDs != nil && !b.added.ids {
		b.added.ids = true // once is enough if several choices end
		list = append(list, nvext.Member{Name: nvext.NameTokenIDs, Value: x.IDs})
	}
	return list
}

// timing returns how long the answer took so far. A plain answer has no visible first token.
func (b *Body) timing() nvext.Timing {
	x, first := b.Extras, b.Sum.First
	ms := func(d time.Duration) *float64 { return new(d.Seconds() * 1000) }
	t := nvext.Timing{
		RequestReceivedMS: uint64(max(0, x.Received.UnixMilli())),
		PrefillWaitTimeMS: ms(x.Begun.Sub(x.Received)),
		TotalTimeMS:       ms(time.Since(x.Received)),
		RouterQueueDepth:  x.Waiting,
	}
	if !first.IsZero() {
		t.PrefillTimeMS, t.TTFTMS = ms(first.Sub(x.Begun)), ms(first.Sub(x.Received))
	}
	if x.Prefilled != nil {
		if t.PrefillTimeMS = nil; !x.Prefilled().IsZero() {
			t.PrefillTimeMS = ms(x.Prefilled().Sub(x.Begun))
		}
	}
	if !b.Stream {
		b.reader.Finish() // only a whole answer gets here
	}
	if c := b.usage(); c.Prompt > 0 && c.Cached >= 0 {
		t.KVHitRate = new(float64(c.Cached) / float64(c.Prompt))
	} else if x.HitRate >= 0 {
		t.KVHitRate = new(x.HitRate)
	}
	return t
}

// addTo returns what the client gets of p. The annotations go out as soon as any bytes came,
// a plain answer with its last bytes. One that is too long passes unchanged.
func (b *Body) addTo(p []byte, came, last bool) []byte {
	e, out := b.added, p
	if !b.Stream && !b.Sum.Skipped {
		e.plain = append(e.plain, p...)
		out = nil
		if b.Sum.Skipped = len(e.plain) > maxPlain; last || b.Sum.Skipped {
			out, e.plain = e.plain, nil
		}
		if last && !b.Sum.Skipped {
			if edits := e.nvext.Edits(out, false); len(edits) > 0 {
				out = rawjson.Splice(nil, out, edits)
			}
		}
	}
	if len(e.before) > 0 && came {
		out = slices.Concat(e.before, out)
		e.before = nil
	}
	return out
}
