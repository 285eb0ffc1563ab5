package nvext

import (
	"math"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// The shapes are those of dynamo-llm's WorkerIdInfo, TimingInfo and Annotated.
func TestAppend(t *testing.T) {
	for want, got := range map[string][]byte{
		`x{"prefill_worker_id":7,"prefill_dp_rank":1,"decode_worker_id":18446744073709551615,"decode_dp_rank":4294967295}`: AppendWorker([]byte("x"), 7, 1, math.MaxUint64, math.MaxUint32),
		`{"request_received_ms":0,"router_queue_depth":0}`:                                                                 Timing{TTFTMS: Some(math.NaN()), TotalTimeMS: Some(math.Inf(1))}.Append(nil),
		`{"request_received_ms":1795000000000,"prefill_wait_time_ms":0.5,"prefill_time_ms":12,"ttft_ms":12.5,"total_time_ms":100.25,"kv_hit_rate":0.75,"router_queue_depth":3}`: Timing{
			1795000000000, Some(0.5), Some(12.0), Some(12.5), Some(100.25), Some(0.75), 3,
		}.Append(nil),
		`[]`:               AppendTokens(nil, nil),
		`[0,1,4294967295]`: AppendTokens(nil, []uint32{0, 1, math.MaxUint32}),
		`{"worker_id":{"decode_worker_id":7},"token_ids":[1]}`: AppendObject(nil, []Member{{NameWorkerID, []byte(`{"decode_worker_id":7}`)}, {NameTokenIDs, []byte(`[1]`)}}),
		"event: token_ids\n: [1,2,3]\n\n":                      AppendAnnotation(nil, NameTokenIDs, AppendTokens(nil, []uint32{1, 2, 3})),
		"event: request_id\n: \"a\\\"b\\nc\"\n\n":              AppendAnnotation(nil, NameRequestID, rawjson.AppendString(nil, "a\"b\nc")),
		"event: a b\n: {   } \n\n":                             AppendAnnotation(nil, "a\rb", []byte("{ \r\n}\n")),
	} {
		if string(got) != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
