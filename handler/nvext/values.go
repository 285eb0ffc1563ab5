package nvext

import (
	"bytes"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// What fields should be.
const (
	wantObject  = "an object"
	wantBool    = "a boolean"
	wantString  = "a string"
	wantFull    = "a string that is not empty"
	wantStrings = "an array of at most 64 strings"
	wantWeights = "an object of at most 64 numbers"
	wantText    = "a string of at most 8192 bytes"
	wantName    = "a string of at most 256 bytes"
	wantU64     = "an integer from 0 to 18446744073709551615"
	wantU32     = "an integer from 0 to 4294967295"
	wantI32     = "an integer from -2147483648 to 2147483647"
	wantI64     = "an integer of 64 bits"
	wantIDs     = "an array of at most 4096 integers from 0 to 18446744073709551615"
	wantPrompt  = "an array of at most 16777216 integers from 0 to 4294967295"
	wantTTL     = `a number of seconds from 1 on, or a string such as "300", "5m" or "1h"`
)

// limits is a range of numbers.
type limits struct {
	least, most float64
	bits        int
	want        string
}

var (
	anyNumber   = limits{-math.MaxFloat64, math.MaxFloat64, 64, "a finite number"}
	notNegative = limits{0, math.MaxFloat64, 64, "a finite number that is not negative"}
	fraction    = limits{0, 1, 64, "a number from 0 to 1"}
	float32s    = limits{-math.MaxFloat32, math.MaxFloat32, 32, "a finite number of 32 bits"}
)

func (p *parser) bool() (b Opt[bool]) {
	switch p.at.First(p.raw) {
	case 't':
		return Some(true)
	case 'f':
		return Some(false)
	}
	p.wrong(wantBool)
	return b
}

// digits returns the text of a number, nothing for another value.
func (p *parser) digits() string {
	if c := p.at.First(p.raw); c != '-' && (c < '0' || c > '9') {
		return ""
	}
	return rawjson.View(p.at.Of(p.raw))
}

// isInteger returns whether the text is that of a number without a point or an
// exponent.
func isInteger(digits string) bool { return digits != "" && !strings.ContainsAny(digits, ".eE") }

// integer reads an integer of that many bits with one of strconv's functions.
func integer[T any](p *parser, bits int, want string, parse func(s string, base, bits int) (T, error)) (i Opt[T]) {
	digits := p.digits()
	if !isInteger(digits) {
		p.wrong(want)
		return i
	}
	n, err := parse(digits, 10, bits)
	if err != nil {
		p.invalid(want, describe(p.at.Of(p.raw)))
		return i
	}
	return Some(n)
}

func (p *parser) uint64() Opt[uint64] { return integer(p, 64, wantU64, strconv.ParseUint) }

func (p *parser) uint32() Opt[uint32] {
	n := integer(p, 32, wantU32, strconv.ParseUint)
	return Opt[uint32]{uint32(n.Value), n.Set}
}

// rank reads a data-parallel rank.
func (p *parser) rank() Opt[uint32] {
	n := p.uint32()
	if n.Value == UnsetRank {
		return Opt[uint32]{}
	}
	return n
}

func (p *parser) number(l limits) (f Opt[float64]) {
	digits := p.digits()
	if digits == "" {
		p.wrong(l.want)
		return f
	}
	n, err := strconv.ParseFloat(digits, l.bits)
	if err != nil || n < l.least || n > l.most {
		p.invalid(l.want, describe(p.at.Of(p.raw)))
		return f
	}
	return Some(n)
}

// str reads a string. It may point into the body.
func (p *parser) str() (s string, ok bool) {
	if p.at.First(p.raw) != '"' {
		p.wrong(wantString)
		return "", false
	}
	return p.at.Text(p.raw), true
}

// text reads a text of at most MaxText.
func (p *parser) text() string {
	s, _ := p.str()
	if len(s) > MaxText {
		p.invalid(wantText, lengthOf(s))
		return ""
	}
	return strings.Clone(s)
}

func (p *parser) action() Action {
	s, ok := p.str()
	for _, a := range []Action{ActionOpen, ActionBind, ActionClose} {
		if s == a.String() {
			return a
		}
	}
	if ok {
		p.invalid(`"open", "bind" or "close"`, describeWord(s))
	}
	return ActionNone
}

// ttl reads a time to live: seconds, or a text of a number and s, m or h.
func (p *parser) ttl() time.Duration {
	digits, unit := p.digits(), uint64(1)
	switch {
	case isInteger(digits):
	case p.at.First(p.raw) == '"':
		digits, unit = cutUnit(p.at.Text(p.raw))
	default:
		p.wrong(wantTTL)
		return 0
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || n == 0 {
		got := describe(p.at.Of(p.raw))
		if p.digits() == "" {
			got = describeWord(p.at.Text(p.raw))
		}
		p.invalid(wantTTL, got)
		return 0
	}
	if n > uint64(MaxTTL/time.Second)/unit {
		return MaxTTL
	}
	return time.Duration(n*unit) * time.Second
}

// cutUnit returns a text without its unit, and the unit in seconds.
func cutUnit(s string) (digits string, seconds uint64) {
	for _, u := range []struct {
		suffix  string
		seconds uint64
	}{{"s", 1}, {"m", 60}, {"h", 3600}} {
		if digits, ok := strings.CutSuffix(s, u.suffix); ok {
			return digits, u.seconds
		}
	}
	return s, 1
}

// list calls each for every element of a list, with the parser's place there. It
// continues after the largest number of elements to check the types of the rest.
func (p *parser) list(most int, want string, each func()) {
	whole := p.place
	if whole.at.First(p.raw) != '[' {
		p.wrong(want)
		return
	}
	n := 0
	for at := range whole.at.Elements(p.raw) {
		if n == most {
			p.place = whole
			p.invalid(want, "more")
		}
		n++
		p.at, p.item = at, n
		each()
	}
}

// words calls each for every string of a list. The string may point into the
// body.
func (p *parser) words(each func(s string)) {
	p.list(MaxList, wantStrings, func() {
		if s, ok := p.str(); ok {
			each(s)
		}
	})
}

// ids reads a list of worker ids.
func (p *parser) ids() []uint64 {
	ids := make([]uint64, 0, min(MaxWorkers, bytes.Count(p.at.Of(p.raw), []byte{','})+1))
	p.list(MaxWorkers, wantIDs, func() {
		if id := p.uint64(); len(ids) < MaxWorkers {
			ids = append(ids, id.Value)
		}
	})
	return ids
}

// taints reads the names of required taints.
func (p *parser) taints() (names []string) {
	p.words(func(name string) {
		if len(name) > MaxName {
			p.invalid(wantName, lengthOf(name))
		} else if len(names) < MaxList {
			names = append(names, strings.Clone(name))
		}
	})
	return names
}

// weights reads the object of preferred taints.
func (p *parser) weights() (taints []Taint) {
	whole := p.place
	if whole.at.First(p.raw) != '{' {
		p.wrong(wantWeights)
		return nil
	}
	c := rawjson.Enter(p.raw, whole.at.Start)
	for n := 0; c.Next(); n++ {
		name, at := c.Name(), c.Value()
		p.place = whole
		if n == MaxList {
			p.invalid(wantWeights, "more")
			break
		}
		if len(name) > MaxName {
			p.invalid("names of at most 256 bytes", lengthOf(name))
			continue
		}
		p.at, p.item, p.member = at, inMember, name
		if weight := p.number(float32s); weight.Set {
			taints = setTaint(taints, name, float32(weight.Value))
		}
	}
	return taints
}

// setTaint adds a preferred taint, or changes its weight.
func setTaint(taints []Taint, name string, weight float32) []Taint {
	for i := range taints {
		if taints[i].Name == name {
			taints[i].Weight = weight
			return taints
		}
	}
	return append(taints, Taint{strings.Clone(name), weight})
}
