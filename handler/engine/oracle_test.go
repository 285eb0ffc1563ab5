package engine

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"math"
	"math/big"
	"slices"
	"strings"
)

// doc is a JSON object as encoding/json reads it.
type doc = map[string]any

// oracle computes what an engine should get from the client's request, without the
// code of this package, nvext and api.
type oracle struct {
	kind, api string
	raw       map[string]json.RawMessage // the body's members, the last of each name
	nv        doc                        // the nvext that counts
	nvRaw     json.RawMessage            // as written
	null      bool                       // an nvext is null

	pins, priorities, uploads bool   // granted
	tenant, top, held         string // held: the turn's session
	rank, ranks               int
	info                      Info
	set                       Settings

	want    doc
	lacks   []string
	dropped []string
}

// readOracle reads a body. It returns false if that is no object.
func readOracle(body []byte) (o oracle, ok bool) {
	if decode(body, &o.want) != nil || o.want == nil {
		return o, false
	}
	o.raw = make(map[string]json.RawMessage)
	good := true
	ok = pairs(body, func(name string, raw json.RawMessage) {
		o.raw[name] = raw
		if name == nvextMember && string(raw) == "null" {
			o.null = true
		} else if name == nvextMember {
			o.nv, o.nvRaw = nil, raw
			good = good && decode(raw, &o.nv) == nil
		}
	})
	o.top, _ = o.want["cache_salt"].(string)
	return o, ok && good
}

// pairs calls each for all members of an object in order, duplicates included. It
// returns false if the value is no object.
func pairs(object []byte, each func(name string, raw json.RawMessage)) bool {
	d := json.NewDecoder(bytes.NewReader(object))
	if first, err := d.Token(); err != nil || first != json.Delim('{') {
		return false
	}
	for d.More() {
		name, err := d.Token()
		var raw json.RawMessage
		if err != nil || d.Decode(&raw) != nil {
			return false
		}
		each(name.(string), raw)
	}
	return true
}

// on returns whether the request is of one of the APIs.
func (o *oracle) on(apis string) bool { return slices.Contains(strings.Fields(apis), o.api) }

// wish records a field of nvext. The field is lacking if it is not done.
func (o *oracle) wish(field string, there bool, do func() bool) {
	if there && !do() {
		o.lacks = append(o.lacks, field)
	}
}

// integer returns the value of a JSON integer.
func integer(v any) *big.Int {
	n, ok := v.(json.Number)
	if !ok {
		return nil
	}
	i, _ := new(big.Int).SetString(string(n), 10)
	return i
}

func number(i *big.Int) json.Number { return json.Number(i.String()) }

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

// expect computes what the engine should get.
func (o *oracle) expect() {
	before := maps.Clone(o.want)
	hints, _ := o.nv["agent_hints"].(doc)
	priority := integer(hints["priority"])
	if !o.priorities {
		priority = nil
	}
	salt, _ := o.nv["cache_salt"].(string)
	if o.tenant != "" {
		salt = o.tenant
	}
	cache := o.nv["cache_control"] != nil && o.priorities
	upload := o.nv["metadata_upload"] != nil && o.uploads
	ids, _ := o.nv["token_data"].([]any)
	thinking := integer(o.nv["max_thinking_tokens"])
	session, _ := o.nv["session_params"].(doc)
	if o.kind == Dynamo {
		if salt != "" {
			delete(o.want, "cache_salt")
		}
		return
	}
	if o.nv != nil || o.kind == TRTLLM {
		delete(o.want, nvextMember)
	}
	o.wish("greed_sampling", o.nv["greed_sampling"] == true, o.greedy)
	o.wish("use_raw_prompt", o.nv["use_raw_prompt"] == true, func() bool { return false })
	o.wish("token_data", len(ids) > 0, func() bool { return o.ids(ids) })
	o.wish("max_thinking_tokens", thinking != nil, func() bool { return o.thinking(number(thinking)) })
	o.sessions(session, salt)
	o.wish("session_params", session != nil, func() bool { return o.kind == SGLang && o.on("chat completions generate") })
	evicts := o.kind == SGLang && o.info.PriorityEviction && o.set.Priority != Off
	o.wish("cache_control", cache, func() bool {
		if !evicts || !o.on("chat completions generate") {
			return false
		}
		o.want["retention_seconds"] = json.Number("60") // the ttl of every fuzzed request
		return true
	})
	o.wish("cache_salt", salt != "", func() bool { return o.salt(salt) })
	o.wish("agent_hints.priority", priority != nil, func() bool { return o.priority(priority, evicts) })
	o.wish("metadata_upload", upload, func() bool { return false })
	o.ranksAndSteering(before, evicts)
}

// sampled calls set for the objects of sampling_params. It returns whether there are
// any.
func (o *oracle) sampled(set func(doc)) bool {
	switch v := o.want["sampling_params"].(type) {
	case nil:
		fresh := doc{}
		if set(fresh); len(fresh) > 0 {
			o.want["sampling_params"] = fresh
		}
		return true
	case doc:
		set(v)
		return true
	case []any:
		for _, one := range v {
			if _, ok := one.(doc); !ok {
				return false
			}
		}
		for _, one := range v {
			set(one.(doc))
		}
		return len(v) > 0
	}
	return false
}

func (o *oracle) greedy() bool {
	if o.on("chat completions responses messages") {
		o.want["temperature"] = json.Number("0")
		return true
	}
	return o.on("generate tokens") && o.sampled(func(in doc) { in["temperature"] = json.Number("0") })
}

func (o *oracle) ids(ids []any) bool {
	member := map[string]string{"vllm tokens": "token_ids", "sglang chat": "input_ids", "sglang generate": "input_ids", "trtllm chat": "prompt_token_ids"}[o.kind+" "+o.api]
	if o.api == "completions" {
		member = "prompt"
	}
	if member == "" {
		return false
	}
	o.want[member] = ids
	if o.kind == SGLang && o.api == "generate" {
		delete(o.want, "text")
	}
	return true
}

func (o *oracle) thinking(n json.Number) bool {
	switch o.kind {
	case VLLM, TRTLLM:
		if o.set.ThinkingBudget != On {
			return false
		}
		if o.on("chat completions") {
			o.want["thinking_token_budget"] = n
			return true
		}
		first := true
		return o.kind == VLLM && o.on("tokens") && o.sampled(func(in doc) {
			if first {
				in["thinking_token_budget"] = n
			}
			first = false
		})
	case LlamaCpp:
		if o.set.ThinkingBudget == Off || !o.on("chat") {
			return false
		}
		o.want["thinking_budget_tokens"] = n
		return true
	case SGLang:
		if o.set.ThinkingBudget == Off || o.set.ThinkingBudget == Auto && !o.info.StrictThinking {
			return false
		}
		all := true
		set := func(in doc) {
			switch v := in["custom_params"].(type) {
			case nil:
				in["custom_params"] = doc{"thinking_budget": n}
			case doc:
				v["thinking_budget"] = n
			default:
				all = false
			}
		}
		if o.on("chat completions") {
			set(o.want)
			return all
		}
		return o.on("generate") && o.sampled(set) && all
	}
	return false
}

// salt gives the salt to the engines that accept it in an API. The others lose the
// client's own.
func (o *oracle) salt(salt string) bool {
	takes := map[string]string{
		VLLM: "chat completions responses tokens messages embeddings rerank score classify pooling", SGLang: "chat completions responses generate",
		TRTLLM: "chat", Other: "chat completions responses", "": "chat completions responses",
	}[o.kind]
	if o.kind == SGLang {
		o.extra(o.want, o.raw["extra_key"], salt, o.on("generate"))
	}
	if !o.on(takes) {
		delete(o.want, "cache_salt")
		return false
	}
	said := salt
	if (o.kind == VLLM || o.kind == Other || o.kind == "") && len(salt) > 1024 {
		said = "sha256:" + sum(salt)
	}
	o.want["cache_salt"] = said
	return true
}

// extra puts the salt before an extra_key. A digest replaces a long one.
func (o *oracle) extra(in doc, raw json.RawMessage, salt string, always bool) {
	own, isText := in["extra_key"].(string)
	switch {
	case in["extra_key"] == nil && !always:
		return
	case in["extra_key"] == nil:
	case len(raw) > 1024:
		own = "sha256:" + sum(string(raw))
	case !isText:
		own = string(raw)
	}
	in["extra_key"] = "sha256:" + sum(salt) + own
}

func (o *oracle) priority(p *big.Int, evicts bool) bool {
	up := number(p)
	down := number(new(big.Int).Neg(p))
	switch {
	case o.kind == VLLM && o.set.Priority == On && o.on("chat completions responses tokens"):
		o.want["priority"] = down
	case o.kind == SGLang && o.on("chat completions generate") && (evicts || o.set.Priority == On || o.set.Priority == Auto && o.info.Priority):
		if o.want["priority"] = up; o.info.LowFirst {
			o.want["priority"] = down
		}
	case o.kind == TRTLLM && o.set.Priority == On && o.on("chat completions"):
		n, _ := new(big.Float).SetInt(p).Float64()
		o.want["priority"] = (1 + n/(1+math.Abs(n))) / 2
	default:
		return false
	}
	return true
}

// ranksAndSteering sets the rank, and removes members without a grant.
func (o *oracle) ranksAndSteering(before doc, evicts bool) {
	unknown := o.kind == Other || o.kind == ""
	pins, priorities := "", ""
	switch {
	case o.kind == SGLang || unknown:
		pins = "routed_dp_rank data_parallel_rank disagg_prefill_dp_rank"
	case o.kind == LlamaCpp:
		pins = "id_slot"
	}
	ordered := o.set.Priority == On && o.kind != LlamaCpp || evicts || o.kind == SGLang && o.set.Priority == Auto && o.info.Priority
	if ordered {
		priorities = "priority"
	}
	if evicts {
		priorities += " retention_seconds"
	}
	cut := func(names string, granted bool, kind string) {
		for name := range strings.FieldsSeq(names) {
			if granted || before[name] == nil {
				continue
			}
			delete(o.want, name)
			if !slices.Contains(o.dropped, kind) {
				o.dropped = append(o.dropped, kind)
			}
		}
	}
	cut(pins, o.pins, "pins")
	cut(priorities, o.priorities, "priorities")
	if o.kind == SGLang && o.ranks > 1 {
		o.want["routed_dp_rank"] = number(big.NewInt(int64(o.rank)))
		if delete(o.want, "data_parallel_rank"); o.info.Version == "" {
			o.want["data_parallel_rank"] = o.want["routed_dp_rank"]
		}
	}
}
