package engine

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// TestControl drives an engine through its control endpoint.
func TestControl(t *testing.T) {
	e := start(t, Config{AnswerTokens: 4})
	url := e.ControlURL() + "/_engine"
	v := post(t.Context(), url+"/faults", Fault{Kind: Status, Status: 429, Count: 2}).json(t)
	if at(v, "fault", "kind") != "status" || number(at(v, "fault", "count")) != 2 {
		t.Errorf("state %v", v)
	}
	if r := post(t.Context(), e.chatURL(), chatOf(nil, "a"), "X-Any", "kept"); r.status != 429 {
		t.Errorf("status %d", r.status)
	}
	if v := get(t.Context(), url+"/state").json(t); number(at(v, "fault", "count")) != 1 || at(v, "up") != true {
		t.Errorf("state %v", v)
	}
	post(t.Context(), url+"/faults", "{}").checkOK(t)
	post(t.Context(), e.chatURL(), chatOf(nil, "a")).checkOK(t)
	for _, bad := range []string{`{"kind":"x"}`, `{"sort":1}`, `{`} {
		if r := post(t.Context(), url+"/faults", bad); r.status != http.StatusBadRequest || !strings.Contains(string(r.body), `"error"`) {
			t.Errorf("%s: status %d, %s", bad, r.status, r.body)
		}
	}

	var page struct{ Records []Record }
	if err := json.Unmarshal(get(t.Context(), url+"/journal").body, &page); err != nil || len(page.Records) != 2 {
		t.Fatalf("%v, journal %+v", err, page)
	}
	first, second := page.Records[0], page.Records[1]
	if first.Outcome != Refused || first.Status != 429 || first.Header.Get("X-Any") != "kept" || first.Rank != -1 ||
		len(first.BodySHA256) != 64 || first.BodySHA256 != second.BodySHA256 {
		t.Errorf("record %+v", first)
	}
	if second.Outcome != Finished || second.Rank != 0 || second.PromptTokens == 0 || second.AnswerTokens != 4 || second.CachedTokens != 0 ||
		second.FirstTokenMS <= second.AtMS || second.EndMS <= second.FirstTokenMS {
		t.Errorf("record %+v", second)
	}
	if err := json.Unmarshal(get(t.Context(), url+"/journal?after=1&limit=5").body, &page); err != nil || len(page.Records) != 1 || page.Records[0].Seq != 2 {
		t.Errorf("%v, journal %+v", err, page)
	}

	if v := post(t.Context(), url+"/kill", "").json(t); at(v, "up") != false {
		t.Errorf("state %v", v)
	}
	if v := post(t.Context(), url+"/restart?down=1ms", "").json(t); at(v, "up") != true || number(at(v, "life")) != 2 {
		t.Errorf("state %v", v)
	}
	get(t.Context(), e.URL()+"/health").checkOK(t)
}

// TestJournalIsBounded has a journal of ten that is asked to hold more.
func TestJournalIsBounded(t *testing.T) {
	j := newJournal(10)
	if got := j.after(0, 100); len(got) != 0 {
		t.Errorf("%d records in an empty journal", len(got))
	}
	for i := range 25 {
		j.add(&Record{Path: strconv.Itoa(i + 1)})
	}
	for _, tc := range []struct {
		after    uint64
		n        int
		from, to int
	}{{0, 100, 16, 25}, {20, 100, 21, 25}, {16, 3, 17, 19}, {25, 5, 1, 0}, {99, 5, 1, 0}, {0, -1, 1, 0}} {
		got := j.after(tc.after, tc.n)
		if len(got) != tc.to-tc.from+1 {
			t.Fatalf("%+v: %d records", tc, len(got))
		}
		for i, r := range got {
			if r.Path != strconv.Itoa(tc.from+i) || r.Seq != uint64(tc.from+i) {
				t.Errorf("%+v: record %+v", tc, r)
			}
		}
	}
}

// series parses a page of metrics, strictly: each sample belongs to the family
// that was announced before it, and no series comes twice.
func series(t *testing.T, page string) map[string]float64 {
	t.Helper()
	out, kind, family := map[string]float64{}, "", ""
	for line := range strings.Lines(page) {
		line = strings.TrimSuffix(line, "\n")
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			family, kind, _ = strings.Cut(rest, " ")
			continue
		}
		if strings.HasPrefix(line, "# HELP ") {
			continue
		}
		i := strings.LastIndexByte(line, ' ')
		if i < 0 {
			t.Fatalf("line %q", line)
		}
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		name, labels, labelled := strings.Cut(line[:i], "{")
		base := name
		if kind == "histogram" {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				base = strings.TrimSuffix(base, suffix)
			}
		}
		if base != family || labelled && !strings.HasSuffix(labels, "}") {
			t.Fatalf("line %q after the type of %q", line, family)
		}
		if _, twice := out[line[:i]]; twice {
			t.Fatalf("series %q comes twice", line[:i])
		}
		out[line[:i]] = value
	}
	return out
}

// TestMetrics checks vLLM's metrics against what was done, rank by rank.
func TestMetrics(t *testing.T) {
	e := start(t, Config{Ranks: 2, AnswerTokens: 5, BlockSize: 32, Blocks: 100})
	prompt := tokens(1, 100)
	for range 3 {
		post(t.Context(), e.completionURL(), doc{"prompt": prompt}, "X-data-parallel-rank", "1").checkOK(t)
	}
	post(t.Context(), e.completionURL(), doc{"prompt": prompt, "max_tokens": 2}, "X-data-parallel-rank", "0").checkOK(t)
	idle(t, e)
	page := get(t.Context(), e.URL()+"/metrics")
	got := series(t, string(page.body))
	of := func(rank int, name string, more ...string) string {
		return fmt.Sprintf(`%s{engine="%d",%s}`, name, rank, strings.Join(append([]string{label("model_name", "sim-8b")}, more...), ","))
	}
	for key, want := range map[string]float64{
		of(1, "vllm:prefix_cache_queries_total"):                                300,
		of(1, "vllm:prefix_cache_hits_total"):                                   192,
		of(0, "vllm:prefix_cache_hits_total"):                                   0,
		of(1, "vllm:generation_tokens_total"):                                   15,
		of(1, "vllm:request_success_total", label("finished_reason", "stop")):   3,
		of(0, "vllm:request_success_total", label("finished_reason", "length")): 1,
		of(0, "vllm:request_success_total", label("finished_reason", "abort")):  0,
		of(1, "vllm:num_requests_running"):                                      0,
		of(1, "vllm:num_requests_waiting"):                                      0,
		of(1, "vllm:kv_cache_usage_perc"):                                       0,
		of(1, "vllm:num_preemptions_total"):                                     0,
		of(1, "vllm:time_to_first_token_seconds_count"):                         3,
		of(1, "vllm:time_to_first_token_seconds_bucket", label("le", "+Inf")):   3,
		of(1, "vllm:inter_token_latency_seconds_count"):                         12,
		of(0, "vllm:e2e_request_latency_seconds_count"):                         1,
		of(0, "vllm:request_queue_time_seconds_count"):                          1,
		of(0, "vllm:request_prefill_time_seconds_count"):                        1,
	} {
		if v, ok := got[key]; !ok || v != want {
			t.Errorf("%s is %v (%v), want %v", key, v, ok, want)
		}
	}
	if sum := got[of(1, "vllm:time_to_first_token_seconds_sum")]; sum < 3*0.008 {
		t.Errorf("first tokens took %v s", sum)
	}
	if !strings.Contains(string(page.body), `block_size="32",num_gpu_blocks="200"`) {
		t.Error("no cache_config_info")
	}
	began := got["process_start_time_seconds"]
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	again := series(t, string(get(t.Context(), e.URL()+"/metrics").body))
	if now := again["process_start_time_seconds"]; now <= began || again[of(1, "vllm:prefix_cache_hits_total")] != 0 {
		t.Errorf("started at %v, then at %v", began, now)
	}
}

// TestRanks has two ranks with caches of their own. A pinned request finds its
// prompt on its rank only, and requests that run at once are spread.
func TestRanks(t *testing.T) {
	e := start(t, Config{Ranks: 2, Speed: 20})
	body := doc{"prompt": tokens(1, 100), "max_tokens": 1}
	for i, want := range []struct {
		rank   string
		cached int
	}{{"1", 0}, {"1", 96}, {"0", 0}, {"0", 96}} {
		v := post(t.Context(), e.completionURL(), body, "X-data-parallel-rank", want.rank).json(t)
		if cached(v) != want.cached || strconv.Itoa(e.lastRecord(t, "/v1/completions").Rank) != want.rank {
			t.Errorf("request %d hit %d, record %+v", i, cached(v), e.lastRecord(t, "/v1/completions"))
		}
	}
	r := post(t.Context(), e.completionURL(), body, "X-data-parallel-rank", "2")
	if r.status != 400 || !strings.Contains(string(r.body), "data_parallel_rank 2 is out of range [0, 2).") {
		t.Errorf("status %d, %s", r.status, r.body)
	}
	done := make(chan reply, 6)
	for i := range 6 {
		body := doc{"prompt": tokens(1000*i, 50), "max_tokens": 2000, "ignore_eos": true}
		var pin []string
		if i < 3 { // then the others go where there is less to do
			pin = []string{"X-data-parallel-rank", "1"}
		}
		go func() { done <- post(t.Context(), e.completionURL(), body, pin...) }()
		eventually(t, "the request runs", func() bool { // one that waits weighs more
			s := e.State().Ranks
			return s[0].Running+s[1].Running == i+1
		})
	}
	if s := e.State().Ranks; s[0].Running != 3 {
		t.Errorf("ranks %+v", s)
	}
	e.Kill()
	for range 6 {
		<-done
	}
}
