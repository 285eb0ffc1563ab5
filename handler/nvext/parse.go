package nvext

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// ErrMalformed says that an nvext is not valid JSON.
var ErrMalformed = errors.New("nvext: malformed JSON")

// wire is an nvext as JSON. Nil and null say nothing, and so do fields that are raw here. The tag grant is
// the kind of trust without which a field has no effect, here or in a Dynamo. The tag own marks fields that
// no Dynamo gets: the router's own, and those that Dynamo 1.3 refuses.
type wire struct {
	Ext
	RequestTimestampMS json.RawMessage `json:"request_timestamp_ms"`
	Annotations        []string        `json:"annotations" grant:"explain"`
	ExtraFields        []string        `json:"extra_fields" grant:"explain"`
	TokenData          json.RawMessage `json:"token_data"` // Parse takes it out before
	SessionControl     *struct {
		SessionID *string `json:"session_id"`
		Action    *string `json:"action"`
		Timeout   *uint64 `json:"timeout"`
	} `json:"session_control" own:"true"`
	SessionParams struct {
		ID string `json:"id"`
	} `json:"session_params" own:"true"`
	CacheControl *struct {
		Type *string         `json:"type" grant:"priorities"`
		TTL  json.RawMessage `json:"ttl" grant:"priorities"`
	} `json:"cache_control" grant:"priorities" own:"true"`
	Override struct {
		OverlapScoreCredit *float64 `json:"overlap_score_credit" grant:"overrides"`
		PrefillLoadScale   *float64 `json:"prefill_load_scale" grant:"overrides"`
		Temperature        *float64 `json:"router_temperature" grant:"overrides"`
		AssumeKVReuse      *bool    `json:"assume_kv_reuse" grant:"overrides"`
		TrackPrefillTokens *bool    `json:"track_prefill_tokens" grant:"overrides"`
		AllowedWorkerIDs   []uint64 `json:"allowed_worker_ids" grant:"overrides"`
	} `json:"router_config_override" grant:"overrides" own:"true"`
	MetadataUpload *struct {
		URL *string `json:"url" grant:"uploads"`
	} `json:"metadata_upload" grant:"uploads"`
	RoutingConstraints struct {
		RequiredTaints  []string           `json:"required_taints" grant:"overrides"`
		PreferredTaints map[string]float32 `json:"preferred_taints" grant:"overrides"`
	} `json:"routing_constraints" grant:"overrides"`
	Router struct {
		TTFTTarget json.RawMessage `json:"ttft_target"`
		ITLTarget  json.RawMessage `json:"itl_target"`
	} `json:"router"`
}

// Parse reads the value of an nvext member. Null, as the whole value or as a
// field's, counts as absent. If a field occurs several times, the last one
// counts. Integers have neither a point nor an exponent. router_config_override
// may contain allowed_worker_ids, which then replaces the one beside it. longest bounds
// session_control.timeout and cache_control.ttl; it is at most MaxTTL.
//
// The error is ErrMalformed, or its text names a wrong field and what the field
// should be. The text may be shown to the client.
func Parse(raw []byte, longest time.Duration) (Ext, error) {
	all := rawjson.Span{Start: rawjson.SkipSpace(raw, 0), End: len(raw)}
	ids, n, rest := all.Get(raw, "token_data"), 0, raw
	if ids.Len() > 0 && !ids.IsNull(raw) { // they may be most of a body
		var end int
		if n, end = scanTokens(raw, ids.Start); end == ids.End {
			rest = slices.Concat(raw[:ids.Start], []byte("null"), raw[ids.End:])
		} else {
			n = -1
		}
	}
	var w wire
	if err := json.Unmarshal(rest, &w); err != nil {
		return Ext{}, explained(err)
	}
	if n < 0 || n > MaxTokens {
		return Ext{}, expected("token_data", "an array of at most "+strconv.Itoa(MaxTokens)+" integers from 0 to 4294967295")
	}
	if err := cmp.Or(w.check(), checkMembers(rest, rawjson.Document(rest), "", fields)); err != nil {
		return Ext{}, err
	}
	e, err := w.ext(longest)
	if err != nil {
		return Ext{}, err
	}
	if e.TokenCount = n; !ids.IsNull(raw) {
		e.TokenSpan = ids
	}
	if params := all.Get(raw, "session_params"); params.First(raw) == '{' {
		e.SessionParams.Span = params
	}
	return e, nil
}

func expected(field, want string) error {
	return errors.New(strings.TrimSuffix("nvext."+field, ".") + ": expected " + want)
}

func explained(err error) error {
	wrong, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return ErrMalformed
	}
	want := "an object"
	switch wrong.Type.Kind() { //nolint:exhaustive // wire has no others
	case reflect.Bool:
		want = "a boolean"
	case reflect.String:
		want = "a string"
	case reflect.Slice:
		want = "an array"
	case reflect.Uint64:
		want = "an integer from 0 to 18446744073709551615"
	case reflect.Uint32:
		want = "an integer from 0 to 4294967295"
	case reflect.Int32:
		want = "an integer from -2147483648 to 2147483647"
	case reflect.Float64, reflect.Float32:
		want = "a finite number of " + strconv.Itoa(wrong.Type.Bits()) + " bits"
	}
	return expected(strings.TrimPrefix(wrong.Field, "Ext."), want)
}

func (w *wire) check() error {
	c, over, taints := w.SessionControl, &w.Override, &w.RoutingConstraints
	long := func(s string) bool { return len(s) > MaxText }
	names := func(list []string) bool {
		return len(list) <= MaxList && !slices.ContainsFunc(list, func(s string) bool { return len(s) > MaxName })
	}
	negative := func(n *float64) bool { return n != nil && *n < 0 }
	const (
		text  = "a string of at most 8192 bytes"
		some  = "a string that is not empty"
		words = "an array of at most 64 strings of at most 256 bytes"
		ids   = "an array of at most 4096 integers"
		least = "a number that is not negative"
	)
	for _, wrong := range []struct {
		is          bool
		field, want string
	}{
		{long(w.CacheSalt), "cache_salt", text},
		{!names(w.Annotations), "annotations", words},
		{!names(w.ExtraFields), "extra_fields", words},
		{len(w.AllowedWorkerIDs) > MaxWorkers, "allowed_worker_ids", ids},
		{c != nil && c.SessionID == nil, "session_control.session_id", "a string"},
		{c != nil && c.SessionID != nil && long(*c.SessionID), "session_control.session_id", text},
		{c != nil && c.Action != nil && !slices.Contains(actions[1:], *c.Action), "session_control.action", `"open", "bind" or "close"`},
		{c != nil && c.Action != nil && c.SessionID != nil && *c.SessionID == "", "session_control.session_id", some},
		{long(w.SessionParams.ID), "session_params.id", text},
		{w.CacheControl != nil && w.CacheControl.Type != nil && *w.CacheControl.Type != "ephemeral", "cache_control.type", `"ephemeral"`},
		{negative(over.OverlapScoreCredit), "router_config_override.overlap_score_credit", least},
		{negative(over.PrefillLoadScale), "router_config_override.prefill_load_scale", least},
		{negative(over.Temperature), "router_config_override.router_temperature", least},
		{len(over.AllowedWorkerIDs) > MaxWorkers, "router_config_override.allowed_worker_ids", ids},
		{w.MetadataUpload != nil && w.MetadataUpload.URL == nil, "metadata_upload.url", "a string"},
		{w.MetadataUpload != nil && w.MetadataUpload.URL != nil && strings.TrimSpace(*w.MetadataUpload.URL) == "", "metadata_upload.url", some},
		{w.MetadataUpload != nil && w.MetadataUpload.URL != nil && long(*w.MetadataUpload.URL), "metadata_upload.url", text},
		{!names(taints.RequiredTaints), "routing_constraints.required_taints", words},
		{
			!names(slices.Collect(maps.Keys(taints.PreferredTaints))), "routing_constraints.preferred_taints",
			"an object of at most 64 numbers",
		},
	} {
		if wrong.is {
			return expected(wrong.field, wrong.want)
		}
	}
	return nil
}

// checkMembers counts the members of an object, and of those in it.
func checkMembers(raw []byte, object rawjson.Span, path string, fields []field) error {
	n := 0
	for key, v := range object.Members(raw) {
		n++
		if i := indexOf(fields, rawjson.View(key)); i >= 0 && fields[i].in != nil {
			if err := checkMembers(raw, v, fields[i].name, fields[i].in); err != nil {
				return err
			}
		}
	}
	if n > MaxMembers {
		return expected(path, fmt.Sprintf("an object of at most %d members, got %d", MaxMembers, n))
	}
	return nil
}

func (w *wire) ext(longest time.Duration) (e Ext, err error) {
	c, over, taints := w.SessionControl, &w.Override, &w.RoutingConstraints
	e = w.Ext
	for _, rank := range []*Opt[uint32]{&e.DPRank, &e.PrefillDPRank} {
		if rank.Value == UnsetRank {
			*rank = Opt[uint32]{}
		}
	}
	e.SessionParams.ID, e.RoutingConstraints.RequiredTaints = w.SessionParams.ID, taints.RequiredTaints
	e.Override = kvscore.Override{
		OverlapScoreCredit: bounded(over.OverlapScoreCredit), PrefillLoadScale: bounded(over.PrefillLoadScale),
		Temperature: bounded(over.Temperature), AssumeKVReuse: over.AssumeKVReuse, TrackPrefillTokens: over.TrackPrefillTokens,
	}
	if over.AllowedWorkerIDs != nil {
		e.AllowedWorkerIDs = over.AllowedWorkerIDs
	}
	for _, name := range w.Annotations {
		e.Annotations |= annotationNamed(name)
	}
	for _, name := range w.ExtraFields {
		e.ExtraFields |= fieldNamed(name)
	}
	for _, name := range slices.Sorted(maps.Keys(taints.PreferredTaints)) {
		e.RoutingConstraints.PreferredTaints = append(e.RoutingConstraints.PreferredTaints, Taint{name, taints.PreferredTaints[name]})
	}
	if c != nil && *c.SessionID != "" { // an empty one means that the request has no session
		timeout := cmp.Or(c.Timeout, new(uint64(DefaultTimeout/time.Second)))
		e.SessionControl = SessionControl{SessionID: *c.SessionID, Timeout: clamp(*timeout, longest), Timed: c.Timeout != nil}
		if c.Action != nil {
			e.SessionControl.Action = Action(slices.Index(actions[:], *c.Action)) //nolint:gosec // checked
		}
	}
	if w.CacheControl != nil {
		if e.CacheTTL, err = ttl(w.CacheControl.TTL, longest); err != nil {
			return e, err
		}
	}
	if w.MetadataUpload != nil {
		e.MetadataUpload = strings.TrimSpace(*w.MetadataUpload.URL)
	}
	return e, nil
}

// bounded returns a number of an override within its bound.
func bounded(n *float64) *float64 {
	if n != nil {
		*n = min(*n, maxOverride)
	}
	return n
}

// clamp returns a time of that many seconds within its bounds: one second and longest.
func clamp(seconds uint64, longest time.Duration) time.Duration {
	return min(max(time.Duration(min(seconds, uint64(MaxTTL/time.Second)))*time.Second, time.Second), longest)
}

// ttl reads a time to live: seconds, or a text of a number and s, m or h.
func ttl(raw []byte, longest time.Duration) (Opt[time.Duration], error) {
	if len(raw) == 0 || string(raw) == "null" {
		return Some(clamp(uint64(DefaultTTL/time.Second), longest)), nil
	}
	text := strings.Trim(string(raw), `"`)
	digits := strings.TrimRight(text, "smh")
	unit, ok := map[string]uint64{"": 1, "s": 1, "m": 60, "h": 3600}[text[len(digits):]]
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) || n == 0 || !ok {
		return Opt[time.Duration]{}, expected("cache_control.ttl", `a number of seconds from 1 on, or a string such as "300", "5m" or "1h"`)
	}
	return Some(clamp(min(n, uint64(MaxTTL/time.Second))*unit, longest)), nil
}

// scanTokens counts the 32-bit integers of the list at b[i]. It returns the index
// behind the list, 0 if the value is anything else.
func scanTokens(b []byte, i int) (count, end int) {
	if b[i] != '[' {
		return 0, 0
	}
	if i = rawjson.SkipSpace(b, i+1); i < len(b) && b[i] == ']' {
		return 0, i + 1
	}
	for ; i < len(b); i = rawjson.SkipSpace(b, i+1) {
		n, first := uint64(0), i
		for ; i < len(b) && b[i]-'0' <= 9 && n < 1<<32; i++ {
			n = n*10 + uint64(b[i]-'0')
		}
		if i == first || n >= 1<<32 || b[first] == '0' && i > first+1 {
			return 0, 0
		}
		count++
		if i < len(b) && b[i] == ',' {
			continue // the usual form
		}
		if i = rawjson.SkipSpace(b, i); i == len(b) || b[i] != ',' {
			break
		}
	}
	if i >= len(b) || b[i] != ']' {
		return 0, 0
	}
	return count, i + 1
}

// IDs returns a JSON list of at most MaxTokens token ids, as a copy without white space, and
// their number. It is nil if list is anything else.
func IDs(list []byte) (ids []byte, n int) {
	if len(list) == 0 {
		return nil, 0
	}
	n, end := scanTokens(list, 0)
	if end != len(list) || n > MaxTokens {
		return nil, 0
	}
	ids = make([]byte, 0, len(list))
	for part := range bytes.FieldsSeq(list) {
		ids = append(ids, part...)
	}
	return ids, n
}
