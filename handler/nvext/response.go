package nvext

import (
	"bytes"
	"encoding/json"
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
