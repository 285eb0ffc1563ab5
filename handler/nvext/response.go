package nvext

import (
	"bytes"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Names of an answer's members and annotations that the router makes itself.
const (
	NameWorkerID        = "worker_id"
	NameTiming          = "timing"
	NameTokenIDs        = "token_ids" // a member and an annotation
	NameRequestID       = "request_id"
	NameFormattedPrompt = "formatted_prompt"
)

// Member is a member of an answer's nvext.
type Member struct {
	// Name has no characters that JSON escapes.
	Name string
	// Value is valid JSON.
	Value []byte
}

// WorkerID says who has answered: the member worker_id. What is not set is
// left out.
type WorkerID struct {
	PrefillWorkerID Opt[uint64]
	PrefillDPRank   Opt[uint32]
	DecodeWorkerID  Opt[uint64]
	DecodeDPRank    Opt[uint32]
}

// OneWorker says that one worker has done all of a request.
func OneWorker(id uint64, rank uint32) WorkerID {
	return WorkerID{PrefillWorkerID: Some(id), PrefillDPRank: Some(rank), DecodeWorkerID: Some(id), DecodeDPRank: Some(rank)}
}

// Append appends the member's value.
func (w WorkerID) Append(dst []byte) []byte {
	o := rawjson.Object{Buf: dst}
	o.Open()
	appendUint(&o, "prefill_worker_id", w.PrefillWorkerID)
	appendUint(&o, "prefill_dp_rank", wide(w.PrefillDPRank))
	appendUint(&o, "decode_worker_id", w.DecodeWorkerID)
	appendUint(&o, "decode_dp_rank", wide(w.DecodeDPRank))
	o.Close()
	return o.Buf
}

// Timing says how long an answer took: the member timing of the chunk that
// ends it. What is not set, and what is no number, is left out.
type Timing struct {
	RequestReceivedMS            uint64       // milliseconds since 1970
	PrefillWaitTimeMS            Opt[float64] // from then to the prefill's start
	PrefillTimeMS                Opt[float64] // from that to the first token
	TTFTMS                       Opt[float64] // from the request to the first token
	TotalTimeMS                  Opt[float64]
	KVHitRate                    Opt[float64] // the share of the prompt's blocks that were cached, 0 to 1
	RouterQueueDepth             Opt[uint64]  // requests that waited when this one came
	KVTransferEstimatedLatencyMS Opt[float64]
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
	appendUint(&o, "router_queue_depth", t.RouterQueueDepth)
	appendFloat(&o, "kv_transfer_estimated_latency_ms", t.KVTransferEstimatedLatencyMS)
	o.Close()
	return o.Buf
}

// AppendTokens appends token ids as JSON: the value of the member and the
// payload of the annotation token_ids.
func AppendTokens(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}

// AppendObject appends an nvext of these members.
func AppendObject(dst []byte, all []Member) []byte {
	o := rawjson.Object{Buf: dst}
	o.Open()
	appendMembers(&o, all, 0)
	o.Close()
	return o.Buf
}

// AppendAnnotation appends an annotation as Dynamo frames it: an event with a
// name and no data, and the payload, which is JSON, as a comment. Line breaks,
// which would end the comment, become spaces.
func AppendAnnotation(dst []byte, name string, payload []byte) []byte {
	dst = append(dst, "event: "...)
	dst = appendLine(dst, []byte(name))
	dst = append(dst, "\n: "...)
	dst = appendLine(dst, payload)
	return append(dst, "\n\n"...)
}

func appendLine(dst, line []byte) []byte {
	for len(line) > 0 {
		n := bytes.IndexAny(line, "\r\n")
		if n < 0 {
			return append(dst, line...)
		}
		dst = append(append(dst, line[:n]...), ' ')
		line = line[n+1:]
	}
	return dst
}

func wide(n Opt[uint32]) Opt[uint64] { return Opt[uint64]{uint64(n.Value), n.Set} }

// appendUint and appendFloat append a member if it is set.
func appendUint(o *rawjson.Object, name string, n Opt[uint64]) {
	if n.Set {
		o.Uint(name, n.Value)
	}
}

func appendFloat(o *rawjson.Object, name string, n Opt[float64]) {
	if n.Set {
		o.Float(name, n.Value)
	}
}

// appendMembers appends members, but for those whose bit is set in but.
func appendMembers(o *rawjson.Object, all []Member, but uint64) {
	for i, one := range all {
		if but>>i&1 == 0 {
			o.Raw(one.Name, one.Value)
		}
	}
}
