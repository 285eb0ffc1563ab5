package nvext

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// ErrMalformed says that an nvext is not valid JSON, or nests deeper than
// rawjson.MaxDepth.
var ErrMalformed = errors.New("nvext: malformed JSON")

// Parse reads the value of an nvext member. Null, as the whole value or as a
// field's, counts as absent. If a field occurs several times, the last one
// counts. Integers have neither a point nor an exponent. router_config_override
// may contain allowed_worker_ids, which then replaces the one beside it.
//
// The error is ErrMalformed, or its text names a wrong field and what the field
// should be. The text may be shown to the client.
func Parse(raw []byte, o Options) (Ext, error) {
	i := rawjson.SkipSpace(raw, 0)
	if i == len(raw) || raw[i] != '{' {
		v, ok := rawjson.ValueAt(raw, i)
		switch {
		case !ok || !gjson.ValidBytes(raw):
			return Ext{}, ErrMalformed
		case v.IsNull(raw):
			return Ext{}, nil
		}
		return Ext{}, &fieldError{"nvext", "an object"}
	}
	p := parser{raw: raw, opt: o}
	w, end := p.object(fields, i)
	if end == 0 || rawjson.SkipSpace(raw, end) != len(raw) {
		return Ext{}, ErrMalformed
	}
	if w != nil {
		w.field = "nvext" + w.field
		return Ext{}, w
	}
	for _, rank := range []*Opt[uint32]{&p.ext.DPRank, &p.ext.PrefillDPRank} {
		if rank.Value == UnsetRank {
			*rank = Opt[uint32]{}
		}
	}
	return p.ext, nil
}

// parser reads one nvext into ext.
type parser struct {
	raw []byte
	opt Options
	ext Ext

	checked bool // the members of the outermost object are valid JSON
	ids     int  // how many ids the last token_data has, -1 for a value that is no list of ids
}

// object reads the fields of the object at raw[i] in the table's order. It returns the
// index behind the object, 0 for malformed JSON, of which it reads no field.
func (p *parser) object(fields []field, i int) (unknown *fieldError, end int) {
	var last [maxFields]gjson.Result
	c := rawjson.Enter(p.raw, i)
	for c.Next() {
		name := c.Name()
		ok := p.checked || gjson.Valid(rawjson.View(p.raw[c.KeyAt:c.KeyEnd]))
		v, valid := p.value(&c, name)
		if !ok || !valid {
			return nil, 0
		}
		if n := indexOf(fields, name); n >= 0 {
			last[n] = v
		} else if p.opt.Strict && unknown == nil {
			unknown = &fieldError{field: "." + shown(name)}
		}
	}
	if !c.Done {
		return nil, 0
	}
	p.checked = true
	for n := range fields {
		if w := p.read(&fields[n], last[n]); w != nil {
			w.field = "." + fields[n].name + w.field
			return w, c.At
		}
	}
	return unknown, c.At
}

// value passes the value of a field. It is not ok if the value is malformed. Token ids
// may be most of a body, so one pass checks and counts them.
func (p *parser) value(c *rawjson.Cursor, name string) (v gjson.Result, ok bool) {
	at := c.At
	if name == "token_data" {
		n, end := scanTokens(p.raw, at)
		if p.ids = n; end > 0 {
			c.At = end
			return gjson.Result{Type: gjson.JSON, Raw: rawjson.View(p.raw[at:end]), Index: at}, true
		}
		p.ids = -1
	}
	raw := rawjson.View(c.Value().Of(p.raw)) // which bounds the nesting: gjson recurses
	v = gjson.Parse(raw)
	v.Index = at
	return v, len(raw) > 0 && (p.checked || gjson.Valid(raw))
}

// read reads the value of a field, which is Null if the object lacks the field.
func (p *parser) read(f *field, v gjson.Result) *fieldError {
	switch {
	case v.Type == gjson.Null && f.required:
		return expected("a string")
	case v.Type == gjson.Null:
		return nil
	case f.in != nil && !v.IsObject():
		return expected("an object")
	case f.in != nil:
		if w, _ := p.object(f.in, v.Index); w != nil {
			return w
		}
	}
	switch {
	case f.read != nil:
		return f.read(p, v)
	case f.to != nil:
		return set(v, f.to(&p.ext))
	}
	return nil
}

// fieldError says which field of an nvext is wrong. Without want the field is unknown.
type fieldError struct {
	// field is the path to the field, such as "nvext.token_data[2]".
	field string
	want  string
}

// Error returns a text that may be shown to the client.
func (w *fieldError) Error() string {
	if w.want == "" {
		return w.field + ": unknown field"
	}
	return w.field + ": expected " + w.want
}

// expected says what a value should be.
func expected(want string) *fieldError { return &fieldError{want: want} }

// shown returns the part of a client's name that an error repeats.
func shown(s string) string {
	const most = 32
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "\ufffd")
}

// reader reads the value of a field into a parser's ext.
type reader func(p *parser, v gjson.Result) *fieldError

// set reads a plain value: a boolean, a number, or a text of at most MaxText.
func set(v gjson.Result, to any) (w *fieldError) {
	switch to := to.(type) {
	case *Opt[bool]:
		to.Value, w = v.Bool(), isBool(v)
		to.Set = true
	case **bool:
		*to, w = new(v.Bool()), isBool(v)
	case *Opt[uint64]:
		return whole(v, 0, math.MaxUint64, to)
	case *Opt[uint32]:
		return whole(v, 0, math.MaxUint32, to)
	case *Opt[int32]:
		return whole(v, math.MinInt32, math.MaxInt32, to)
	case *Opt[float64]:
		to.Value, w = number(v, -math.MaxFloat64, "a finite number")
		to.Set = true
	case **float64:
		n, w := number(v, 0, "a finite number that is not negative")
		*to = new(min(n, maxOverride))
		return w
	case *string:
		*to, w = str(v, MaxText)
	}
	return w
}

func isBool(v gjson.Result) *fieldError {
	if !v.IsBool() {
		return expected("a boolean")
	}
	return nil
}

// whole reads an integer from least to most.
func whole[T uint64 | uint32 | int32](v gjson.Result, least int64, most uint64, to *Opt[T]) *fieldError {
	n, ok := integer(v, least, most)
	if !ok {
		return expected("an integer from " + strconv.FormatInt(least, 10) + " to " + strconv.FormatUint(most, 10))
	}
	*to = Some(T(n))
	return nil
}

// integer returns a number without a point or an exponent. It is not ok if the
// value is something else, or out of range. A negative one is its complement.
func integer(v gjson.Result, least int64, most uint64) (n uint64, ok bool) {
	if v.Type != gjson.Number {
		return 0, false
	}
	if n, err := strconv.ParseInt(v.Raw, 10, 64); err == nil && n < 0 {
		return uint64(n), n >= least
	}
	n, err := strconv.ParseUint(v.Raw, 10, 64)
	return n, err == nil && n <= most
}

// number reads a number from least on.
func number(v gjson.Result, least float64, want string) (float64, *fieldError) {
	n, err := strconv.ParseFloat(v.Raw, 64)
	if v.Type != gjson.Number || err != nil || n < least {
		return 0, expected(want)
	}
	return n, nil
}

// str reads a text of at most so many bytes.
func str(v gjson.Result, most int) (string, *fieldError) {
	switch {
	case v.Type != gjson.String:
		return "", expected("a string")
	case len(v.Str) > most:
		return "", expected("a string of at most " + strconv.Itoa(most) + " bytes")
	}
	return strings.Clone(v.Str), nil
}

// list calls each for every element of a list of at most so many.
func list(v gjson.Result, most int, of string, each func(v gjson.Result) *fieldError) (w *fieldError) {
	want := "an array of at most " + strconv.Itoa(most) + " " + of
	if !v.IsArray() {
		return expected(want)
	}
	n := 0
	v.ForEach(func(_, v gjson.Result) bool {
		if n == most {
			w = expected(want)
		} else if w = each(v); w != nil {
			w.field = "[" + strconv.Itoa(n) + "]"
		}
		n++
		return w == nil
	})
	return w
}

// words reads a list of texts of at most MaxName, of which the parser keeps none.
func words(each func(e *Ext, name string)) reader {
	return func(p *parser, v gjson.Result) *fieldError {
		return list(v, MaxList, "strings", func(v gjson.Result) *fieldError {
			name, w := str(v, MaxName)
			if w == nil {
				each(&p.ext, name)
			}
			return w
		})
	}
}

// workers reads allowed_worker_ids.
func workers(p *parser, v gjson.Result) *fieldError {
	p.ext.AllowedWorkerIDs = []uint64{}
	return list(v, MaxWorkers, "integers", func(v gjson.Result) *fieldError {
		id, ok := integer(v, 0, math.MaxUint64)
		if !ok {
			return expected("an integer from 0 to 18446744073709551615")
		}
		p.ext.AllowedWorkerIDs = append(p.ext.AllowedWorkerIDs, id)
		return nil
	})
}

// tokenData judges the token_data that value has passed.
func tokenData(p *parser, v gjson.Result) *fieldError {
	if p.ids < 0 || p.ids > MaxTokens {
		return expected("an array of at most 16777216 integers from 0 to 4294967295")
	}
	p.ext.TokenCount, p.ext.TokenSpan = p.ids, rawjson.Span{Start: v.Index, End: v.Index + len(v.Raw)}
	return nil
}

func action(p *parser, v gjson.Result) *fieldError {
	for _, a := range []Action{ActionOpen, ActionBind, ActionClose} {
		if v.Type == gjson.String && v.Str == a.String() {
			p.ext.SessionControl.Action = a
			return nil
		}
	}
	return expected(`"open", "bind" or "close"`)
}

func timeout(p *parser, v gjson.Result) *fieldError {
	n, ok := integer(v, 0, math.MaxUint64)
	if !ok {
		return expected("an integer from 0 to 18446744073709551615")
	}
	p.ext.SessionControl.Timeout, p.ext.SessionControl.Timed = p.opt.clamp(n), true
	return nil
}

// sessionControl completes session_control. An empty session_id means that the
// request has no session, so there can be no action.
func sessionControl(p *parser, _ gjson.Result) *fieldError {
	c := &p.ext.SessionControl
	switch {
	case c.SessionID == "" && c.Action != ActionNone:
		return &fieldError{field: ".session_id", want: "a string that is not empty"}
	case c.SessionID == "":
		c.Timeout = 0
	case !c.Timed:
		c.Timeout = p.opt.clamp(uint64(DefaultTimeout.Seconds()))
	}
	return nil
}

func sessionParams(p *parser, v gjson.Result) *fieldError {
	p.ext.SessionParams.Span = rawjson.Span{Start: v.Index, End: v.Index + len(v.Raw)}
	return nil
}

func cacheType(_ *parser, v gjson.Result) *fieldError {
	if v.Type == gjson.String && v.Str == "ephemeral" {
		return nil
	}
	return expected(`"ephemeral"`)
}

// ttl reads a time to live: seconds, or a text of a number and s, m or h.
func ttl(p *parser, v gjson.Result) *fieldError {
	digits, unit := v.Raw, uint64(1)
	if v.Type == gjson.String {
		digits = strings.TrimRight(v.Str, "smh")
		switch v.Str[len(digits):] {
		case "", "s":
		case "m":
			unit = 60
		case "h":
			unit = 3600
		default:
			digits = ""
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) || n == 0 {
		return expected(`a number of seconds from 1 on, or a string such as "300", "5m" or "1h"`)
	}
	p.ext.CacheTTL = Some(p.opt.clamp(min(n, uint64(MaxTTL/time.Second)) * unit))
	return nil
}

// cacheControl completes cache_control, which may lack the time to live.
func cacheControl(p *parser, _ gjson.Result) *fieldError {
	if !p.ext.CacheTTL.Set {
		p.ext.CacheTTL = Some(p.opt.clamp(uint64(DefaultTTL.Seconds())))
	}
	return nil
}

func uploadURL(p *parser, v gjson.Result) *fieldError {
	url, w := str(v, MaxText)
	if p.ext.MetadataUpload = strings.TrimSpace(url); w == nil && p.ext.MetadataUpload == "" {
		return expected("a string that is not empty")
	}
	return w
}

// preferredTaints reads the object of preferred taints.
func preferredTaints(p *parser, v gjson.Result) (w *fieldError) {
	const want = "an object of at most 64 finite numbers of 32 bits"
	if !v.IsObject() {
		return expected(want)
	}
	taints := &p.ext.RoutingConstraints.PreferredTaints
	v.ForEach(func(key, v gjson.Result) bool {
		weight, err := strconv.ParseFloat(v.Raw, 32)
		i := slices.IndexFunc(*taints, func(t Taint) bool { return t.Name == key.Str })
		switch {
		case v.Type != gjson.Number || err != nil || len(key.Str) > MaxName:
			w = expected(want)
			w.field = "." + shown(key.Str)
		case i >= 0:
			(*taints)[i].Weight = float32(weight)
		case len(*taints) == MaxList:
			w = expected(want)
		default:
			*taints = append(*taints, Taint{strings.Clone(key.Str), float32(weight)})
		}
		return w == nil
	})
	return w
}
