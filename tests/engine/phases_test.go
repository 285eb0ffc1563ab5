package engine

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// start starts an engine whose times pass a hundred times as fast.
func start(t *testing.T, cfg Config) *Engine {
	t.Helper()
	cfg.Speed = 100
	e, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// reply is an answer.
type reply struct {
	status int
	text   string
}

// post asks for a chat about a topic, with further members.
func post(t *testing.T, e *Engine, topic string, more map[string]any) (r reply) {
	t.Helper()
	body := map[string]any{"messages": []any{map[string]string{"role": "user", "content": strings.Repeat(topic+" ", 400)}}}
	maps.Copy(body, more)
	data, _ := json.Marshal(body)
	resp, err := http.Post(e.URL()+"/v1/chat/completions", "application/json", bytes.NewReader(data)) //nolint:noctx // it ends with the engine
	if err != nil {
		return r
	}
	defer resp.Body.Close()
	all, _ := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, string(all)}
}

func (r reply) get(path string) gjson.Result { return gjson.Get(r.text, path) }
func (r reply) said() string                 { return r.get("choices.0.message.content").Str }
func (r reply) cached() int64                { return r.get("usage.prompt_tokens_details.cached_tokens").Int() }

// nixl are the parameters of a vLLM's prefill phase.
var nixl = map[string]any{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil}

// TestVLLMLegs does what was captured of two vLLM 0.32 with NIXL on a CPU.
func TestVLLMLegs(t *testing.T) {
	tr := &Transfer{Lease: 20 * time.Second}
	p, d, whole := start(t, Config{Transfer: tr}), start(t, Config{Transfer: tr}), start(t, Config{})
	want := post(t, whole, "rivers", nil).said()
	ahead := func(topic string) any {
		r := post(t, p, topic, map[string]any{"max_tokens": 1, "kv_transfer_params": nixl})
		kv := r.get("kv_transfer_params")
		for _, name := range []string{"remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size", "remote_num_tokens", "remote_blocks_expiry_time"} {
			if !kv.Get(name).Exists() {
				t.Fatalf("prefill answers without %s: %s", name, r.text)
			}
		}
		return kv.Value()
	}
	kv := ahead("rivers")
	if n := p.Transfers(); n != (Transfers{Held: 1}) {
		t.Errorf("after the prefill: %+v", n)
	}
	for range 2 { // the same object a second time is accepted
		r := post(t, d, "rivers", map[string]any{"kv_transfer_params": kv})
		if r.status != 200 || r.said() != want || r.cached() != 0 {
			t.Errorf("decode answers %d with %v, %v cached; want %v", r.status, r.said(), r.cached(), want)
		}
	}
	again := post(t, d, "rivers", nil) // it holds the prompt now
	if again.cached() == 0 {
		t.Error("decode does not hold what was transferred")
	}
	if n := p.Transfers(); n != (Transfers{Fetched: 1}) {
		t.Errorf("after the decode: %+v", n)
	}

	ahead("bridges") // nobody fetches it
	lost := ahead("people")
	eventually(t, func() bool { return p.Transfers() == Transfers{Fetched: 1, Expired: 2} })
	p.Kill()
	began := time.Now()
	r := post(t, d, "people", map[string]any{"kv_transfer_params": lost})
	if took := time.Since(began) * 100; r.status != 500 || took < 5*time.Second || !strings.Contains(r.text, "InternalServerError") {
		t.Errorf("a lost prefill: %d after %v: %s", r.status, took, r.text)
	}
	r = post(t, d, "people", map[string]any{"kv_transfer_params": lost, "stream": true})
	if r.status != 200 || !strings.HasPrefix(r.text, `data: {"error":`) {
		t.Errorf("a lost prefill, streamed: %d: %s", r.status, r.text)
	}
	if err := p.Restart(); err != nil {
		t.Fatal(err)
	}
	if err := d.SetFault(Fault{Kind: FailTransfer, Count: 1}); err != nil {
		t.Fatal(err)
	}
	kv = ahead("people")
	for i, status := range []int{500, 200} {
		if r := post(t, d, "people", map[string]any{"kv_transfer_params": kv}); r.status != status {
			t.Errorf("transfer %d: %d, want %d", i, r.status, status)
		}
	}
}

func eventually(t *testing.T, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it never became so")
		}
	}
}

// TestSGLangPhases does what was captured of two SGLang 0.5.23 over NIXL on a CPU.
func TestSGLangPhases(t *testing.T) {
	at := func(r Role) *Engine {
		return start(t, Config{Flavour: SGLang, Transfer: &Transfer{Role: r, Alone: 100 * time.Second}})
	}
	p, d, whole := at(PrefillPhases), at(DecodePhases), start(t, Config{Flavour: SGLang})
	resp, err := http.Get(p.URL() + "/server_info") //nolint:noctx // it ends with the engine
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var info struct {
		Mode string `json:"disaggregation_mode"`
		Port int    `json:"disaggregation_bootstrap_port"`
	}
	if json.NewDecoder(resp.Body).Decode(&info) != nil || info.Mode != "prefill" || info.Port == 0 {
		t.Fatalf("%+v", info)
	}
	both := func(topic string, between func()) (pre, dec reply) {
		words := map[string]any{"bootstrap_host": "127.0.0.1", "bootstrap_port": info.Port, "bootstrap_room": rand.Uint64() >> 1}
		var phases sync.WaitGroup
		phases.Go(func() { dec = post(t, d, topic, words) })
		between()
		phases.Go(func() { pre = post(t, p, topic, words) })
		phases.Wait()
		return pre, dec
	}
	want := post(t, whole, "rivers", nil).said()
	for range 2 {
		pre, dec := both("rivers", func() {})
		if pre.status != 200 || dec.status != 200 || dec.said() != want || pre.cached() != dec.cached() || pre.get("choices.0.finish_reason").Str != "length" {
			t.Errorf("prefill %s\ndecode %s", pre.text, dec.text)
		}
	}
	if n := p.Transfers(); n != (Transfers{Fetched: 2}) {
		t.Errorf("%+v", n)
	}
	if r := post(t, d, "rivers", nil); r.status != 400 || !strings.Contains(r.text, "room") {
		t.Errorf("a plain request: %d %s", r.status, r.text)
	}
	if r := post(t, p, "rivers", map[string]any{"bootstrap_room": 7}); r.status != 500 {
		t.Errorf("prefill alone: %d %s", r.status, r.text)
	}
	var cut reply
	over := make(chan struct{})
	go func() {
		defer close(over)
		cut = post(t, d, "rivers", map[string]any{"bootstrap_host": "127.0.0.1", "bootstrap_port": info.Port, "bootstrap_room": 8, "rid": "abc-1"})
	}()
	eventually(t, func() bool { // what the engine has not begun, it does not abort
		if resp, err := http.Post(d.URL()+AbortPath, "application/json", strings.NewReader(`{"rid":"abc"}`)); err != nil || resp.Body.Close() != nil { //nolint:noctx // the same
			t.Fatal(err)
		}
		select {
		case <-over:
			return true
		default:
			return false
		}
	})
	if cut.status != 400 {
		t.Errorf("aborted: %d %s", cut.status, cut.text)
	}
	pre, dec := both("people", func() { time.Sleep(20 * time.Millisecond); p.Kill() })
	if pre.status != 0 || dec.status != 500 || !strings.Contains(dec.text, "Lost connection with prefill instance") {
		t.Errorf("prefill dies: %d, %d %s", pre.status, dec.status, dec.text)
	}
}
