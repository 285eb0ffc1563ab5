package engine

import "testing"

func TestWhatPathsMean(t *testing.T) {
	for _, v := range []struct {
		path                 string
		all, vllm, sglang    bool
		keepsID, keepsAsName bool
	}{
		{"/flush_cache", true, false, true, true, false},
		{"/v1/load_lora_adapter", true, true, true, true, false},
		{"/load_lora_adapter/", true, true, true, true, false},
		{"/sleep", true, true, false, true, false},
		{"/v1/videos/x/pause", false, false, false, true, false},
		{"/init_weights_update_group", false, false, false, true, false},
		{"/v1/videos", false, false, false, true, false},
		{"/v1/audio/voices", false, false, false, true, true},
		{"/v1/images/generations", false, false, false, true, false},
		{"/invocations", false, false, false, false, false},
		{"/v1/chat/completions/batch", false, false, false, false, false},
		{"/encode", false, false, false, false, false},
	} {
		if got := MeansAll(v.path); got != v.all {
			t.Errorf("%s means all: %v", v.path, got)
		}
		for kind, want := range map[string]bool{VLLM: v.vllm, SGLang: v.sglang, Other: true, "": true, LlamaCpp: false} {
			if got := (&Engine{Type: kind}).Means(v.path); got != want {
				t.Errorf("%s means %s: %v", v.path, kind, got)
			}
		}
		id, name := Kept(v.path, "job_id", "job_1"), Kept(v.path, "name", "bob")
		if (id == "job_1") != v.keepsID || (name == Voice("bob")) != v.keepsAsName || Kept(v.path, "object", "job_1")+Kept(v.path, "id", "videos") != "" {
			t.Errorf("%s: id %q, name %q", v.path, id, name)
		}
	}
}
