package engine

import (
	"encoding/json"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// TestExact goes on with completions; tests/resume_exact_test.go with chats.
func TestExact(t *testing.T) {
	x := NewExact(api.NameCompletions, []byte(`{"model":"m","prompt":"a long one","max_tokens":5}`), []uint32{7, 8}, []uint16{1, 1})
	if render, generate, derender := x.Paths("/p/v1/completions"); render != "/p/v1/completions/render" || generate != "/p/inference/v1/generate" || derender != "/p/v1/completions/derender" {
		t.Error(render, generate, derender)
	}
	ask, ok := x.Generate([]byte(`[{"request_id":"r","token_ids":[1, 2],"sampling_params":{"max_tokens":5},"stream":false}]`))
	if want := `{"request_id":"r","token_ids":[1,2,7,8],"sampling_params":{"max_tokens":3},"stream":true}`; !ok || string(ask) != want {
		t.Errorf("generate %s, want %s", ask, want)
	}
	const rest = `,"prompt_token_ids":[1,2],"completion_request":{"model":"m","prompt":".","max_tokens":5}}`
	if got, want := string(x.Derender(nil)), `{"stream":true,"generate_chunk":{"request_id":"","choices":[{"index":0,"token_ids":[7,8]}]}`+rest; got != want {
		t.Errorf("derender %s, want %s", got, want)
	}
	if _, ok = x.Event([]byte(`{"chunk":{},"stream_state":{"output_token_ids":[7,8],"output_chunk_lens":[2],"x":1}}`)); !ok {
		t.Error("no state")
	}
	pieces := [][]byte{[]byte(`{"choices":[{"index":0,"token_ids":[9],"finish_reason":null}]}`), []byte(`{"choices":[{"index":0,"token_ids":[10, 11],"finish_reason":"stop","stop_reason":3}]}`)}
	want := `{"stream":true,"generate_chunk":{"request_id":"","choices":[{"index":0,"token_ids":[9,10, 11],"finish_reason":"stop","stop_reason":3}]},` +
		`"stream_state":{"output_token_ids":[7,8],"output_chunk_lens":[1,1],"x":1}` + rest
	if got := string(x.Derender(pieces)); got != want {
		t.Errorf("derender %s, want %s", got, want)
	}
	event, ok := x.Event([]byte(`{"chunk":{"id":"a","usage":null,"choices":[{"index":0,"text":"b","logprobs":null,"finish_reason":null,"stop_reason":null}]},"stream_state":{}}`))
	if want := `{"id":"a","choices":[{"index":0,"text":"b","logprobs":null,"finish_reason":null,"token_ids":[9,10, 11]}]}`; !ok || string(event) != want {
		t.Errorf("event %s, want %s", event, want)
	}
	if got := x.Derender([][]byte{[]byte(`{"choices":[{"token_ids":[]}]}`)}); got != nil {
		t.Errorf("derender nothing: %s", got)
	}
}

// FuzzExact reads any answers of the engine's. What the client and the engine get of them is JSON.
func FuzzExact(f *testing.F) {
	f.Add([]byte(`{"token_ids":[1]}`), []byte(`{"chunk":{"choices":[{"delta":{"role":null}}]},"stream_state":{"output_chunk_lens":[2],"output_token_ids":[1,2]}}`),
		[]byte(`{"choices":[{"token_ids":[3],"finish_reason":"stop"}]}`))
	f.Add([]byte(`[{"token_ids":[1],"stream":1}]`), []byte(`{"chunk":{"tool_calls":[]},"stream_state":{"a":{"output_chunk_lens":3}}}`), []byte(`{"choices":[],"usage":{}}`))
	f.Fuzz(func(t *testing.T, rendered, answer, piece []byte) {
		x := NewExact(api.NameChat, []byte(`{"messages":[]}`), []uint32{1}, []uint16{1})
		if ask, ok := x.Generate(rendered); !ok {
			return
		} else if !json.Valid(ask) {
			t.Fatalf("%q is rendered: %q", rendered, ask)
		}
		data, ok := x.Event(answer)
		if ok && (!json.Valid(data) || !json.Valid(x.state)) {
			t.Fatalf("%q gives %q and %q", answer, data, x.state)
		}
		if !json.Valid(piece) {
			return
		}
		if ask := x.Derender([][]byte{piece, piece}); ask != nil && !json.Valid(ask) {
			t.Errorf("%q asks %q", piece, ask)
		}
		if usage := x.Usage(piece); usage != nil && !json.Valid(usage) {
			t.Errorf("%q is usage %q", piece, usage)
		}
	})
}
