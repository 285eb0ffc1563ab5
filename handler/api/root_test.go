package api

import (
	"strings"
	"testing"
)

// TestSaltFromOutsideIsTheBodys has a prompt with a salt in its body, and with
// the same from elsewhere: they share a root, and no other salt does.
func TestSaltFromOutsideIsTheBodys(t *testing.T) {
	parse := func(salt string) *Request {
		r, err := Parse(For("/v1/completions"), []byte(`{"model":"m","prompt":"hello","reasoning_effort":"low"`+salt+`}`), testOptions)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	plain, salted := parse(""), parse(`,"cache_salt":"a"`)
	r := parse("")
	if r.SetSalt(""); r.Root != plain.Root {
		t.Error("no salt has changed the root")
	}
	if r.SetSalt("a"); r.Root != salted.Root || r.Salt != "a" {
		t.Error("the salt from outside makes another root than the body's")
	}
	if r.SetSalt("b"); r.Root == salted.Root || r.Root == plain.Root {
		t.Error("another salt has the same root")
	}
	r = parse(`,"cache_salt":"b"`)
	if r.SetSalt("a"); r.Root != salted.Root {
		t.Error("the body's salt is not replaced")
	}
}

// TestResponseIDs reads the id of a response, as soon as it is there, and of
// nothing else.
func TestResponseIDs(t *testing.T) {
	for _, v := range []struct {
		path, answer, want string
		stream             bool
	}{
		{"/v1/responses", `{"id":"resp_1","object":"response","status":"completed","output":[]}`, "resp_1", false},
		{"/v1/responses", `{"id":"resp_\u0031","status":"queued"}`, "resp_1", false},
		{"/v1/responses", `{"id":5,"status":"completed"}`, "", false},
		{"/v1/responses", `{"id":"` + strings.Repeat("x", maxResponseID+1) + `","status":"completed"}`, "", false},
		{"/v1/responses", "data: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_2\",\"status\":\"in_progress\"}}\n\n", "resp_2", true},
		{"/v1/responses", "data: {\"type\":\"response.output_text.delta\",\"id\":\"x\",\"delta\":\"y\"}\n\n", "", true},
		{"/v1/responses", "data: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_3\",\"status\":\"completed\"}}\n\n", "resp_3", true},
		{"/v1/chat/completions", `{"id":"chatcmpl-1","choices":[]}`, "", false},
	} {
		r, err := Parse(For(v.path), []byte(`{"input":"x","messages":[],"stream":true}`), testOptions)
		if err != nil {
			t.Fatal(err)
		}
		a := observe(r, v.stream)
		text := []byte(v.answer)
		a.Write(text)
		for i := range text { // the memory is used again
			text[i] = '!'
		}
		if got := a.ResponseID(); v.stream && got != v.want {
			t.Errorf("%.80s: while it streams %q, want %q", v.answer, got, v.want)
		}
		if a.Finish(); a.ResponseID() != v.want {
			t.Errorf("%.80s: got %q, want %q", v.answer, a.ResponseID(), v.want)
		}
	}
	for body, want := range map[string]bool{`{"input":"x"}`: false, `{"input":"x","store":true}`: false, `{"input":"x","store":null}`: false, `{"input":"x","store":false}`: true} {
		if r, err := Parse(For("/v1/responses"), []byte(body), testOptions); err != nil || r.Unstored != want {
			t.Errorf("%s: unstored %v, error %v", body, r.Unstored, err)
		}
	}
}
