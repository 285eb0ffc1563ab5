package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// ofPhases are the members by which engines prefill and decode apart.
type ofPhases struct {
	KVTransfer    *kvTransfer    `json:"kv_transfer_params"`
	Disaggregated *disaggregated `json:"disaggregated_params"`
	BootstrapHost string         `json:"bootstrap_host"`
	BootstrapPort int            `json:"bootstrap_port"`
	BootstrapRoom *uint64        `json:"bootstrap_room"`
}

// kvTransfer is vLLM's, for NIXL and for Mooncake, which has the transfer's id and the bootstrap server.
type kvTransfer struct {
	RemotePrefill bool    `json:"do_remote_prefill"`
	RemoteDecode  bool    `json:"do_remote_decode"`
	BlockIDs      [][]int `json:"remote_block_ids"`
	EngineID      string  `json:"remote_engine_id"`
	RequestID     string  `json:"remote_request_id"`
	Host          string  `json:"remote_host"`
	Port          int     `json:"remote_port"`
	TP            int     `json:"tp_size"`
	DCP           int     `json:"dcp_size"`
	PP            int     `json:"pp_size"`
	Tokens        int     `json:"remote_num_tokens"`
	Expires       float64 `json:"remote_blocks_expiry_time"`
	Mode          string  `json:"transfer_mode"`
	Cached        int     `json:"remote_prefill_cached_tokens"`
	Transfer      string  `json:"transfer_id,omitempty"`
	Bootstrap     string  `json:"remote_bootstrap_addr,omitempty"`
}

// disaggregated is TensorRT-LLM's. The opaque state says where the KV is.
type disaggregated struct {
	Type      string   `json:"request_type"`
	Request   *uint64  `json:"disagg_request_id,omitempty"`
	Context   *uint64  `json:"ctx_request_id,omitempty"`
	First     []uint32 `json:"first_gen_tokens,omitempty"`
	State     string   `json:"encoded_opaque_state,omitempty"`
	DraftNone *string  `json:"draft_tokens"`
}

// phase is what a call is if its prompt and its answer are computed apart.
type phase struct {
	prefill bool   // another engine gets its KV
	from    string // the prefill engine's side channel
	asks    url.Values
	room    uint64 // of an SGLang
}

// decode says that the phase gets its KV from another engine.
func (l *phase) decode() bool { return l.asks != nil }

// phaseOf reads which phase of a request is asked for. An engine without transfers ignores it, as they
// do.
func (e *Engine) phaseOf(s shape, r *request) (l phase, aerr *apiError) {
	t := e.cfg.Transfer
	if t == nil || s == responses {
		return l, nil
	}
	switch kv, d := r.KVTransfer, r.Disaggregated; {
	case e.cfg.Flavour == SGLang:
		if r.BootstrapRoom == nil {
			return l, &apiError{http.StatusBadRequest, "BadRequestError", "Invalid request: Disaggregated request received without boostrap room id.", ""}
		}
		l.room, l.prefill = *r.BootstrapRoom, t.Role == PrefillPhases
		if !l.prefill {
			l.from = net.JoinHostPort(r.BootstrapHost, strconv.Itoa(r.BootstrapPort))
			l.asks = url.Values{"room": {strconv.FormatUint(l.room, 10)}}
		}
	case e.cfg.Flavour == VLLM && kv != nil && kv.RemotePrefill && kv.Bootstrap != "":
		l.from, l.asks = strings.TrimPrefix(kv.Bootstrap, "http://"), url.Values{"request": {kv.EngineID + kv.Transfer}}
	case e.cfg.Flavour == VLLM && kv != nil && kv.RemotePrefill:
		l.from, l.asks = net.JoinHostPort(kv.Host, strconv.Itoa(kv.Port)), url.Values{"request": {kv.RequestID}}
	case e.cfg.Flavour == VLLM && kv != nil:
		l.prefill = kv.RemoteDecode
	case e.cfg.Flavour == TRTLLM && d != nil && d.Type == "context_only":
		l.prefill = true
	case e.cfg.Flavour == TRTLLM && d != nil && d.Type == "generation_only":
		addr, id, _ := strings.Cut(d.State, "/")
		l.from, l.asks = addr, url.Values{"request": {id}}
	}
	return l, nil
}

// beginPhase does what comes before a phase's computation: it waits for the other phase, and gets the KV
// of the prompt. It returns false when there is an answer already.
func (x *exchange) beginPhase(c *call, j *job, k *rank) bool {
	l := &c.phase
	if !l.prefill && !l.decode() {
		return true
	}
	if c.stream && !x.openStream() {
		x.gone()
		return false
	}
	if l.decode() {
		return x.pull(c, j, k)
	}
	j.Slot = new(batch.Slot)
	if x.engine.cfg.Flavour != SGLang {
		return true
	}
	if x.room = x.life.side.enterRoom(l.room, func(r *room) *bool { return &r.prefill }); x.room == nil {
		x.failPhase(c, "bootstrap room in use")
		return false
	}
	if met, over := x.wait(x.room.met, x.engine.cfg.Transfer.Alone); !met {
		x.life.side.leaveRoom(l.room, x.room)
		if over {
			x.failPhase(c, fmt.Sprintf("Prefill bootstrap failed for request rank=0 decode_prefill_size=1 bootstrap_room=%d timed out", l.room))
		}
		return false
	}
	return true
}

// wait waits for a channel to be closed. Else either the time is over, or the client or the engine
// is gone, which it notes. The channel may be nil.
func (x *exchange) wait(news <-chan struct{}, most time.Duration) (came, over bool) {
	timer := time.NewTimer(time.Duration(float64(most) / x.engine.cfg.Speed))
	defer timer.Stop()
	select {
	case <-news:
		return true, false
	case <-timer.C:
		return false, true
	case <-x.ctx.Done():
		x.cutOff()
	case <-x.life.dead:
		canned.CloseConn(x.w, false)
		x.gone()
	}
	return false, false
}

// late is for how long a busy machine may delay the answer of a prefill engine that is there.
const late = 10 * time.Second

// pull gets a prompt's KV from the prefill engine.
func (x *exchange) pull(c *call, j *job, k *rank) bool {
	t, began := x.engine.cfg.Transfer, x.engine.clock.now()
	fail := func(why error) bool {
		if x.ctx.Err() == nil && !x.life.over.Load() {
			if _, over := x.wait(nil, t.Lost-(x.engine.clock.now()-began)); !over {
				return false
			}
			x.failPhase(c, fmt.Sprintf("Decode transfer failed for request %s: Lost connection with prefill instance: %v", c.id, why))
			return false
		}
		if x.ctx.Err() != nil {
			x.cutOff()
		} else {
			canned.CloseConn(x.w, false)
			x.gone()
		}
		return false
	}
	if x.fault.Kind == FailTransfer {
		return fail(errors.New("injected"))
	}
	lost := max(t.Lost, time.Duration(float64(late)*x.engine.cfg.Speed))
	most := lost
	if x.engine.cfg.Flavour == SGLang {
		most = t.Alone
	}
	o, err := x.ask(http.MethodGet, &c.phase, most)
	if err != nil {
		return fail(err)
	}
	k.mu.Lock()
	held := k.cache.Hit(c.prompt)
	k.mu.Unlock()
	if _, over := x.wait(nil, t.duration(len(c.prompt.Tokens)-held)); !over {
		return false
	}
	began = x.engine.clock.now()
	if _, err = x.ask(http.MethodPost, &c.phase, lost); err != nil {
		return fail(err)
	}
	j.Loaded, j.told = len(c.prompt.Tokens)-1, &o.Cached
	return true
}

var sideClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// ask asks a prefill engine for the KV of a prompt, or says that it has been fetched.
func (x *exchange) ask(method string, l *phase, most time.Duration) (o offer, err error) {
	ctx, cancel := context.WithTimeout(x.ctx, time.Duration(float64(most)/x.engine.cfg.Speed))
	defer cancel()
	go func() {
		select {
		case <-x.life.dead:
			cancel()
		case <-ctx.Done():
		}
	}()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+l.from+"/?"+l.asks.Encode(), nil)
	if err != nil {
		return o, err
	}
	resp, err := sideClient.Do(req)
	if err != nil {
		return o, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return o, fmt.Errorf("status %d", resp.StatusCode)
	}
	return o, json.NewDecoder(resp.Body).Decode(&o)
}

// failPhase answers 500, or with an error event in a stream that has begun, as a vLLM does.
func (x *exchange) failPhase(c *call, why string) {
	if !c.stream {
		x.reject(&apiError{http.StatusInternalServerError, "InternalServerError", why, ""})
		return
	}
	out, _ := json.Marshal(object{"error": object{"message": why, "type": "InternalServerError", "param": nil, "code": 500}})
	_, _ = fmt.Fprintf(x.w, "data: %s\n\ndata: [DONE]\n\n", out)
	x.finish(Failed)
}

// endPhase hands the KV of a prefill over, before its answer goes out. A vLLM and a TensorRT-LLM
// keep it, and say where. An SGLang waits until it has been fetched; endPhase returns false if that
// does not happen.
func (x *exchange) endPhase(c *call, k *rank, j *job) bool {
	if !c.phase.prefill {
		return true
	}
	p, e := j.look(), x.engine
	it := &kept{offer: offer{len(c.prompt.Tokens), p.cached}, rank: k, slot: j.Slot}
	drop := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		it.slot.Release()
		k.free()
	}
	if x.room != nil {
		defer drop()
		defer x.life.side.leaveRoom(c.phase.room, x.room)
		e.transfers.held.Add(1)
		defer e.transfers.held.Add(-1)
		x.room.offer = it.offer
		close(x.room.ready)
		came, over := x.wait(x.room.fetched, e.cfg.Transfer.Alone)
		switch {
		case came:
			e.transfers.fetched.Add(1)
		default:
			e.transfers.expired.Add(1)
			if over {
				x.failPhase(c, "KVTransferError: the decode engine did not fetch the KV")
			}
		}
		return came
	}
	if c.reason != "length" { // the answer is over
		drop()
		return true
	}
	if kv := c.asked.request.KVTransfer; kv != nil && kv.Transfer != "" {
		x.life.side.keep(x.life.side.name()+kv.Transfer, it)
		return true
	}
	host, port := hostPort(e.SideAddr())
	id := fmt.Sprintf("%s-%d-%d", c.id, x.life.number, x.record.Seq)
	x.life.side.keep(id, it)
	if e.cfg.Flavour == TRTLLM {
		c.inChoice = object{"disaggregated_params": &disaggregated{
			Type: "context_only", Request: c.asked.request.Disaggregated.Request, Context: &x.record.Seq, First: c.answer, State: e.SideAddr() + "/" + id,
		}}
		c.inWhole = object{"prompt_token_ids": c.prompt.Tokens}
		return true
	}
	blocks := make([]int, k.cache.BlocksFor(len(c.prompt.Tokens)))
	for i := range blocks {
		blocks[i] = i + 1
	}
	c.inWhole = object{"kv_transfer_params": &kvTransfer{
		RemotePrefill: true, BlockIDs: [][]int{blocks}, EngineID: x.life.side.name(), RequestID: id,
		Host: host, Port: port, TP: 1, DCP: 1, PP: 1, Tokens: len(c.prompt.Tokens), Mode: "pull", Cached: p.cached,
		Expires: float64(time.Now().UnixMilli())/1e3 + e.cfg.Transfer.Lease.Seconds()/e.cfg.Speed,
	}}
	return true
}

// strand keeps the KV of a prefill whose answer reaches nobody.
func (x *exchange) strand(k *rank, j *job) {
	if j.Slot != nil && j.session == nil {
		x.life.side.keep(fmt.Sprint(x.record.Seq), &kept{rank: k, slot: j.Slot})
	}
}

// abort ends the requests of an SGLang whose id begins with the given one.
func (x *exchange) abort() {
	var r struct {
		RID string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if json.Unmarshal(x.body, &r) != nil || r.RID == "" && !r.All {
		x.reject(badRequest("rid is required"))
		return
	}
	x.life.abortable.Range(func(id, cancel any) bool {
		if r.All || strings.HasPrefix(id.(string), r.RID) {
			cancel.(context.CancelFunc)()
		}
		return true
	})
	x.header(http.StatusOK, "text/plain; charset=utf-8")
}

// cutOff notes that the client left, or answers that the request was aborted.
func (x *exchange) cutOff() {
	if x.r.Context().Err() != nil {
		x.gone()
		return
	}
	if x.record.Status == 0 { // only this goroutine changes it
		x.refuse(&apiError{http.StatusBadRequest, "BadRequestError", "Abort", ""})
	} else {
		canned.CloseConn(x.w, false)
	}
	x.finish(Aborted)
}
