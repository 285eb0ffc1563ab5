package nvext

import (
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
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
		case !ok || !json.Valid(raw):
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
	var last [maxFields]rawjson.Span
	c := rawjson.Enter(p.raw, i)
	for c.Next() {
		name := c.Name()
		ok := p.checked || json.Valid(p.raw[c.KeyAt:c.KeyEnd])
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
func (p *parser) value(c *rawjson.Cursor, name string) (v rawjson.Span, ok bool) {
	if name == "token_data" {
		n, end := scanTokens(p.raw, c.At)
		if p.ids = n; end > 0 {
			v = rawjson.Span{Start: c.At, End: end}
			c.At = end
			return v, true
		}
		p.ids = -1
	}
	v = c.Value()
	return v, v.Len() > 0 && (p.checked || json.Valid(v.Of(p.raw)))
}

// read reads the value of a field, which is absent if the object lacks the field.
func (p *parser) read(f *field, v rawjson.Span) *fieldError {
	switch {
	case v.Len() == 0 || v.IsNull(p.raw):
		if f.required {
			return expected("a string")
		}
		return nil
	case f.in != nil && v.First(p.raw) != '{':
		return expected("an object")
	case f.in != nil:
		if w, _ := p.object(f.in, v.Start); w != nil {
			return w
		}
	}
	switch {
	case f.read != nil:
		return f.read(p, v)
	case f.to != nil:
		return set(v.Of(p.raw), f.to(&p.ext))
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
type reader func(p *parser, v rawjson.Span) *fieldError

const anyUint64 = "an integer from 0 to 18446744073709551615"

// set reads a plain value: a boolean, a number, or a text of at most MaxText.
func set(raw []byte, to any) (w *fieldError) {
	var want string
	switch to := to.(type) {
	case *string:
		*to, w = text(raw, MaxText)
		return w
	case *Opt[bool], **bool:
		want = "a boolean"
	case *Opt[uint64]:
		want = anyUint64
	case *Opt[uint32]:
		want = "an integer from 0 to 4294967295"
	case *Opt[int32]:
		want = "an integer from -2147483648 to 2147483647"
	case *Opt[float64]:
		want = "a finite number"
	case **float64:
		want = "a finite number that is not negative"
	}
	if json.Unmarshal(raw, to) != nil {
		return expected(want)
	}
	if n, ok := to.(**float64); ok {
		if **n < 0 {
			return expected(want)
		}
		**n = min(**n, maxOverride)
	}
	return nil
}

// text returns a string of at most so many bytes. It keeps what is not UTF-8, so that different
// texts stay different.
func text(raw []byte, most int) (string, *fieldError) {
	whole := rawjson.Span{End: len(raw)}
	if whole.First(raw) != '"' {
		return "", expected("a string")
	}
	s := whole.Text(raw)
	if len(s) > most {
		return "", expected("a string of at most " + strconv.Itoa(most) + " bytes")
	}
	return strings.Clone(s), nil
}

// list calls each for every element of a list of at most so many.
func (p *parser) list(v rawjson.Span, most int, of string, each func(raw []byte) *fieldError) *fieldError {
	want := "an array of at most " + strconv.Itoa(most) + " " + of
	if v.First(p.raw) != '[' {
		return expected(want)
	}
	n := 0
	for e := range v.Elements(p.raw) {
		if n == most {
			return expected(want)
		}
		if w := each(e.Of(p.raw)); w != nil {
			w.field = "[" + strconv.Itoa(n) + "]"
			return w
		}
		n++
	}
	return nil
}

// words reads a list of texts of at most MaxName, of which the parser keeps none.
func words(each func(e *Ext, name string)) reader {
	return func(p *parser, v rawjson.Span) *fieldError {
		return p.list(v, MaxList, "strings", func(raw []byte) *fieldError {
			name, w := text(raw, MaxName)
			if w == nil {
				each(&p.ext, name)
			}
			return w
		})
	}
}

// workers reads allowed_worker_ids.
func workers(p *parser, v rawjson.Span) *fieldError {
	p.ext.AllowedWorkerIDs = []uint64{}
	return p.list(v, MaxWorkers, "integers", func(raw []byte) *fieldError {
		id, err := strconv.ParseUint(rawjson.View(raw), 10, 64)
		if err != nil {
			return expected(anyUint64)
		}
		p.ext.AllowedWorkerIDs = append(p.ext.AllowedWorkerIDs, id)
		return nil
	})
}

// tokenData judges the token_data that value has passed.
func tokenData(p *parser, v rawjson.Span) *fieldError {
	if p.ids < 0 || p.ids > MaxTokens {
		return expected("an array of at most 16777216 integers from 0 to 4294967295")
	}
	p.ext.TokenCount, p.ext.TokenSpan = p.ids, v
	return nil
}

func action(p *parser, v rawjson.Span) *fieldError {
	for _, a := range []Action{ActionOpen, ActionBind, ActionClose} {
		if v.Text(p.raw) == a.String() {
			p.ext.SessionControl.Action = a
			return nil
		}
	}
	return expected(`"open", "bind" or "close"`)
}

func timeout(p *parser, v rawjson.Span) *fieldError {
	var n Opt[uint64]
	w := set(v.Of(p.raw), &n)
	p.ext.SessionControl.Timeout, p.ext.SessionControl.Timed = p.opt.clamp(n.Value), true
	return w
}

// sessionControl completes session_control. An empty session_id means that the
// request has no session, so there can be no action.
func sessionControl(p *parser, _ rawjson.Span) *fieldError {
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

func sessionParams(p *parser, v rawjson.Span) *fieldError {
	p.ext.SessionParams.Span = v
	return nil
}

func cacheType(p *parser, v rawjson.Span) *fieldError {
	if v.Text(p.raw) == "ephemeral" {
		return nil
	}
	return expected(`"ephemeral"`)
}

// ttl reads a time to live: seconds, or a text of a number and s, m or h.
func ttl(p *parser, v rawjson.Span) *fieldError {
	digits, unit := rawjson.View(v.Of(p.raw)), uint64(1)
	if v.First(p.raw) == '"' {
		whole := v.Text(p.raw)
		digits = strings.TrimRight(whole, "smh")
		switch whole[len(digits):] {
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
func cacheControl(p *parser, _ rawjson.Span) *fieldError {
	if !p.ext.CacheTTL.Set {
		p.ext.CacheTTL = Some(p.opt.clamp(uint64(DefaultTTL.Seconds())))
	}
	return nil
}

func uploadURL(p *parser, v rawjson.Span) *fieldError {
	url, w := text(v.Of(p.raw), MaxText)
	if p.ext.MetadataUpload = strings.TrimSpace(url); w == nil && p.ext.MetadataUpload == "" {
		return expected("a string that is not empty")
	}
	return w
}

// preferredTaints reads the object of preferred taints.
func preferredTaints(p *parser, v rawjson.Span) *fieldError {
	w := expected("an object of at most 64 finite numbers of 32 bits")
	if v.First(p.raw) != '{' {
		return w
	}
	taints := &p.ext.RoutingConstraints.PreferredTaints
	for c := rawjson.Enter(p.raw, v.Start); c.Next(); {
		name := c.Name()
		weight, err := strconv.ParseFloat(rawjson.View(c.Value().Of(p.raw)), 32)
		i := slices.IndexFunc(*taints, func(t Taint) bool { return t.Name == name })
		switch {
		case err != nil || len(name) > MaxName:
			w.field = "." + shown(name)
			return w
		case i >= 0:
			(*taints)[i].Weight = float32(weight)
		case len(*taints) == MaxList:
			return w
		default:
			*taints = append(*taints, Taint{strings.Clone(name), float32(weight)})
		}
	}
	return nil
}
