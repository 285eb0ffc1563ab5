package nvext

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Names of the members and annotations that the router adds to an answer.
const (
	NameWorkerID        = "worker_id"
	NameTiming          = "timing"
	NameTokenIDs        = "token_ids" // a member and an annotation
	NameRequestID       = "request_id"
	NameFormattedPrompt = "formatted_prompt"
)

// Member is a member of an answer's nvext.
type Member struct {
	Name  string // without characters that JSON escapes
	Value []byte // valid JSON
}

// MemberOf returns a member whose value is encoded as JSON.
func MemberOf(name string, value any) Member {
	raw, _ := json.Marshal(value) // it has finite numbers only
	return Member{name, raw}
}

// Workers is the member worker_id: the worker that computed the prompt, and the one that answers.
// They are mostly the same.
type Workers struct {
	PrefillWorker uint64 `json:"prefill_worker_id"`
	PrefillRank   uint32 `json:"prefill_dp_rank"`
	DecodeWorker  uint64 `json:"decode_worker_id"`
	DecodeRank    uint32 `json:"decode_dp_rank"`
}

// Timing is the member timing of an answer's last chunk.
type Timing struct {
	RequestReceivedMS uint64   `json:"request_received_ms"`            // milliseconds since 1970
	PrefillWaitTimeMS *float64 `json:"prefill_wait_time_ms,omitempty"` // from the request to the prefill's start
	PrefillTimeMS     *float64 `json:"prefill_time_ms,omitempty"`      // from the prefill's start to the first token
	TTFTMS            *float64 `json:"ttft_ms,omitempty"`              // from the request to the first token
	TotalTimeMS       *float64 `json:"total_time_ms,omitempty"`
	KVHitRate         *float64 `json:"kv_hit_rate,omitempty"` // the cached share of the prompt's blocks, 0 to 1
	RouterQueueDepth  uint64   `json:"router_queue_depth"`    // queued requests when this one arrived
}

// AppendObject appends an nvext with these members.
func AppendObject(dst []byte, all []Member) []byte {
	o := rawjson.Object{Buf: dst}
	o.Open()
	for _, one := range all {
		o.Raw(one.Name, one.Value)
	}
	o.Close()
	return o.Buf
}

// AppendAnnotation appends an annotation in Dynamo's form: an event with a name,
// no data, and the JSON payload as a comment. Line breaks would end the comment,
// so they become spaces.
func AppendAnnotation(dst []byte, name string, payload []byte) []byte {
	payload = bytes.ReplaceAll(payload, []byte{'\r'}, []byte{' '})
	payload = bytes.ReplaceAll(payload, []byte{'\n'}, []byte{' '})
	return fmt.Appendf(dst, "event: %s\n: %s\n\n", name, payload)
}

// Additions are members to add to the nvext of an answer. They replace the
// engine's members of the same name: the client does not know the engine's own
// workers. The engine's other members stay.
type Additions struct {
	// Each goes into every chunk of a stream, and into a plain answer.
	Each []Member
	// Final returns further members for each chunk that has a finish reason, and
	// for a plain answer. It may be nil.
	Final func() []Member

	all   []Member // of Each and of Final, while an object is edited
	edits []rawjson.Edit
	text  []byte
}

// Edits returns the edits that put the additions into the nvext of an answer's
// object, valid until the next call. It returns none for a malformed object, an
// error, an nvext that is no object, and a chunk without choices. Only chat and
// completions have chunks with choices.
func (a *Additions) Edits(b []byte, chunk bool) []rawjson.Edit {
	o, ok := outlineOf(b)
	if !ok || chunk && !o.choices {
		return nil
	}
	a.all = append(a.all[:0], a.Each...)
	if a.Final != nil && (o.finished || !chunk) {
		a.all = append(a.all, a.Final()...)
	}
	if len(a.all) == 0 {
		return nil
	}
	w := rawjson.Object{Buf: a.text[:0], More: !o.empty}
	at := rawjson.Span{Start: o.brace, End: o.brace}
	switch v := o.nvext; {
	case v.End == 0:
		w.Name("nvext")
		w.Buf = AppendObject(w.Buf, a.all)
	case v.IsNull(b):
		at, w.Buf = v, AppendObject(w.Buf, a.all)
	case v.First(b) == '{':
		e := rawjson.EditAt(b, v.Start, math.MaxInt)
		for _, one := range a.all {
			e.Cut(one.Name)
			e.Set(one.Name, one.Value)
		}
		return e.Edits()
	default:
		return nil
	}
	a.text = w.Buf
	a.edits = append(a.edits[:0], rawjson.Edit{Span: at, Text: w.Buf})
	return a.edits
}

// outline is what an edit must know of an answer's object.
type outline struct {
	nvext    rawjson.Span // the last, the zero Span if there is none
	brace    int          // the index of the closing bracket
	empty    bool         // no members
	choices  bool         // has a list of choices
	finished bool         // a choice has a finish reason
}

// outlineOf reads an answer's object. It is not ok if the answer is no object,
// malformed or an error.
func outlineOf(b []byte) (o outline, ok bool) {
	c, ok := rawjson.Open(b)
	for ok && c.Next() {
		key := string(c.Key())
		v := c.Value()
		switch key {
		case "nvext":
			o.nvext = v
		case "error":
			ok = v.IsNull(b)
		case "object":
			ok = string(v.Of(b)) != `"error"`
		case "choices":
			o.choices = v.First(b) == '['
			o.finished = finished(b, v)
		}
	}
	o.brace, o.empty = c.At-1, c.Empty
	return o, ok && c.Alone()
}

func finished(b []byte, choices rawjson.Span) bool {
	for choice := range choices.Objects(b) {
		switch string(choice.Get(b, "finish_reason").Of(b)) {
		case "", "null", `""`:
		default:
			return true
		}
	}
	return false
}
