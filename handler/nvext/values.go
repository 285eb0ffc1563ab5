package nvext

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// What fields should be.
const (
	wantObject   = "an object"
	wantBool     = "a boolean"
	wantString   = "a string"
	wantStrings  = "an array of at most 64 strings"
	wantWeights  = "an object of at most 64 numbers"
	wantText     = "a string of at most 8192 bytes"
	wantName     = "a string of at most 256 bytes"
	wantU64      = "an integer from 0 to 18446744073709551615"
	wantU32      = "an integer from 0 to 4294967295"
	wantI32      = "an integer from -2147483648 to 2147483647"
	wantI64      = "an integer of 64 bits"
	wantNumber   = "a finite number"
	wantPositive = "a finite number that is not negative"
	wantF32      = "a finite number of 32 bits"
	wantFraction = "a number from 0 to 1"
	wantIDs      = "an array of at most 4096 integers from 0 to 18446744073709551615"
	wantPrompt   = "an array of at most 16777216 integers from 0 to 4294967295"
	wantTTL      = `a number of seconds from 1 on, or a string such as "300", "5m" or "1h"`
)

func (o *object) bool(i int) (b Opt[bool]) {
	v, ok := o.value(i)
	switch {
	case !ok:
	case v.Type == gjson.True, v.Type == gjson.False:
		return Some(v.Type == gjson.True)
	default:
		o.wrong(i, wantBool, v)
	}
	return b
}

// isInteger tells whether a number is written as one.
func isInteger(v gjson.Result) bool {
	return v.Type == gjson.Number && !strings.ContainsAny(v.Raw, ".eE")
}

// unsigned reads an integer from 0 to the largest of so many bits.
func (o *object) unsigned(i int, g Grants, bits int, want string) (n uint64, ok bool) {
	v, ok := o.value(i)
	if !ok {
		return 0, false
	}
	if !isInteger(v) {
		return 0, o.wrong(i, want, v)
	}
	n, err := strconv.ParseUint(v.Raw, 10, bits)
	if err != nil {
		return 0, o.invalid(i, g, want, describe(v))
	}
	return n, true
}

func (o *object) u64(i int, g Grants) Opt[uint64] {
	n, ok := o.unsigned(i, g, 64, wantU64)
	return Opt[uint64]{n, ok}
}

func (o *object) u32(i int, g Grants) Opt[uint32] {
	n, ok := o.unsigned(i, g, 32, wantU32)
	return Opt[uint32]{uint32(n), ok}
}

// rank reads a data-parallel rank.
func (o *object) rank(i int) Opt[uint32] {
	n := o.u32(i, Pins)
	if n.Value == UnsetRank {
		return Opt[uint32]{}
	}
	return n
}

// signed reads an integer of so many bits.
func (o *object) signed(i int, g Grants, bits int, want string) (n int64, ok bool) {
	v, ok := o.value(i)
	if !ok {
		return 0, false
	}
	if !isInteger(v) {
		return 0, o.wrong(i, want, v)
	}
	n, err := strconv.ParseInt(v.Raw, 10, bits)
	if err != nil {
		return 0, o.invalid(i, g, want, describe(v))
	}
	return n, true
}

// limits are the least and the most of a number.
type limits struct{ least, most float64 }

var (
	unbounded = limits{-math.MaxFloat64, math.MaxFloat64}
	positive  = limits{0, math.MaxFloat64}
	fraction  = limits{0, 1}
)

func (o *object) number(i int, g Grants, l limits, want string) (f Opt[float64]) {
	v, ok := o.value(i)
	if !ok {
		return f
	}
	if v.Type != gjson.Number {
		o.wrong(i, want, v)
		return f
	}
	n, err := strconv.ParseFloat(v.Raw, 64)
	if err != nil || n < l.least || n > l.most {
		o.invalid(i, g, want, describe(v))
		return f
	}
	return Some(n)
}

// text reads a text of at most MaxText.
func (o *object) text(i int, g Grants) string {
	v, ok := o.value(i)
	if !ok {
		return ""
	}
	if v.Type != gjson.String {
		o.wrong(i, wantString, v)
		return ""
	}
	if len(v.Str) > MaxText {
		o.invalid(i, g, wantText, lengthOf(v.Str))
		return ""
	}
	return strings.Clone(v.Str)
}

func lengthOf(s string) string { return "one of " + strconv.Itoa(len(s)) }

// list calls each for the elements of an array, until that returns false. It
// goes on behind the most that there may be, for their types are checked, too.
func (o *object) list(i int, g Grants, most int, want string, each func(n int, v gjson.Result) bool) {
	v, ok := o.value(i)
	if !ok {
		return
	}
	if !v.IsArray() {
		o.wrong(i, want, v)
		return
	}
	n := 0
	for s := range o.at[i].Elements(o.p.raw) {
		if n == most {
			o.invalid(i, g, want, "more")
		}
		if !each(n, gjson.Parse(rawjson.View(s.Of(o.p.raw)))) {
			return
		}
		n++
	}
}

// element returns the path to the nth element of field i.
func (o *object) element(i, n int) string { return o.field(i) + "[" + strconv.Itoa(n) + "]" }

// word returns the text of the nth element of field i. It is not ok if that is
// none.
func (o *object) word(i, n int, v gjson.Result) (s string, ok bool) {
	if v.Type != gjson.String {
		return "", o.p.fail(&FieldError{Field: o.element(i, n), Want: wantString, Got: describe(v)})
	}
	return v.Str, true
}

// ids reads a list of worker ids, nil if it is absent.
func (o *object) ids(i int, g Grants) []uint64 {
	v, ok := o.value(i)
	if !ok {
		return nil
	}
	ids := make([]uint64, 0, min(MaxWorkers, strings.Count(v.Raw, ",")+1))
	o.list(i, g, MaxWorkers, wantIDs, func(n int, v gjson.Result) bool {
		if !isInteger(v) {
			return o.p.fail(&FieldError{Field: o.element(i, n), Want: wantU64, Got: describe(v)})
		}
		id, err := strconv.ParseUint(v.Raw, 10, 64)
		if err != nil {
			o.p.invalid(g, &FieldError{Field: o.element(i, n), Want: wantU64, Got: describe(v)})
		}
		if len(ids) < MaxWorkers {
			ids = append(ids, id)
		}
		return true
	})
	return ids
}

// taints reads the names of required taints.
func (o *object) taints(i int) (names []string) {
	o.list(i, Overrides, MaxList, wantStrings, func(n int, v gjson.Result) bool {
		name, ok := o.word(i, n, v)
		if len(name) > MaxName {
			o.p.invalid(Overrides, &FieldError{Field: o.element(i, n), Want: wantName, Got: lengthOf(name)})
		} else if ok && len(names) < MaxList {
			names = append(names, strings.Clone(name))
		}
		return ok
	})
	return names
}

// weights reads the object of preferred taints.
func (o *object) weights(i int) (taints []Taint) {
	v, ok := o.value(i)
	if !ok {
		return nil
	}
	if !v.IsObject() {
		o.wrong(i, wantWeights, v)
		return nil
	}
	c := rawjson.Enter(o.p.raw, o.at[i].Start)
	for n := 0; c.Next(); n++ {
		name := c.Name()
		s := c.Value()
		if n == MaxList {
			o.invalid(i, Overrides, wantWeights, "more")
			break
		}
		if len(name) > MaxName {
			o.invalid(i, Overrides, "names of at most 256 bytes", lengthOf(name))
			continue
		}
		taints = o.weight(i, taints, name, gjson.Parse(rawjson.View(s.Of(o.p.raw))))
	}
	return taints
}

// weight adds a preferred taint, or changes it if it has been there.
func (o *object) weight(i int, taints []Taint, name string, v gjson.Result) []Taint {
	if v.Type != gjson.Number {
		o.p.fail(&FieldError{Field: o.member(i, name), Want: wantF32, Got: describe(v)})
		return taints
	}
	n, err := strconv.ParseFloat(v.Raw, 32)
	if err != nil {
		o.p.invalid(Overrides, &FieldError{Field: o.member(i, name), Want: wantF32, Got: describe(v)})
		return taints
	}
	for j := range taints {
		if taints[j].Name == name {
			taints[j].Weight = float32(n)
			return taints
		}
	}
	return append(taints, Taint{strings.Clone(name), float32(n)})
}

// member returns the path to a member of field i whose name is the client's.
func (o *object) member(i int, name string) string { return o.field(i) + "." + shownName(name) }

// ttl reads a time to live: seconds, or a text of a number and s, m or h.
func (o *object) ttl(i int, g Grants) time.Duration {
	v, ok := o.value(i)
	if !ok {
		return DefaultTTL
	}
	digits, unit, got := v.Raw, uint64(1), describe(v)
	switch {
	case isInteger(v):
	case v.Type == gjson.String:
		digits, unit = cutUnit(v.Str)
		got = describeWord(v)
	default:
		o.wrong(i, wantTTL, v)
		return 0
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || n == 0 {
		o.invalid(i, g, wantTTL, got)
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
