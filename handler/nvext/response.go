package nvext

import (
	"bytes"
	"fmt"

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

// AppendWorker appends the value of the member worker_id: the worker that computed the prompt, and
// the one that answers. They are mostly the same.
func AppendWorker(dst []byte, prefill uint64, prefillRank uint32, decode uint64, decodeRank uint32) []byte {
	o := rawjson.Object{Buf: dst}
	o.Open()
	o.Uint("prefill_worker_id", prefill)
	o.Uint("prefill_dp_rank", uint64(prefillRank))
	o.Uint("decode_worker_id", decode)
	o.Uint("decode_dp_rank", uint64(decodeRank))
	o.Close()
	return o.Buf
}

// Timing is the member timing of an answer's last chunk. The JSON omits what is
// not set or not a number.
type Timing struct {
	RequestReceivedMS uint64       // milliseconds since 1970
	PrefillWaitTimeMS Opt[float64] // from the request to the prefill's start
	PrefillTimeMS     Opt[float64] // from the prefill's start to the first token
	TTFTMS            Opt[float64] // from the request to the first token
	TotalTimeMS       Opt[float64]
	KVHitRate         Opt[float64] // the cached share of the prompt's blocks, 0 to 1
	RouterQueueDepth  uint64       // queued requests when this one arrived
}

// Append appends the member's value.
func (t Timing) Append(dst []byte) []byte {
	o := rawjson.Object{Buf: dst}
	o.Open()
	o.Uint("request_received_ms", t.RequestReceivedMS)
	appendFloat(&o, "prefill_wait_time_ms", t.PrefillWaitTimeMS)
	appendFloat(&o, "prefill_time_ms", t.PrefillTimeMS)
	appendFloat(&o, "ttft_ms", t.TTFTMS)
	appendFloat(&o, "total_time_ms", t.TotalTimeMS)
	appendFloat(&o, "kv_hit_rate", t.KVHitRate)
	o.Uint("router_queue_depth", t.RouterQueueDepth)
	o.Close()
	return o.Buf
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

func appendFloat(o *rawjson.Object, name string, n Opt[float64]) {
	if n.Set {
		o.Float(name, n.Value)
	}
}
