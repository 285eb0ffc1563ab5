package plan

import (
	"crypto/sha256"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// headerRule says of one field which headers set it, the first that is there,
// which grant it needs, and what it can be.
type headerRule struct {
	names    []string
	grant    nvext.Grants
	form     *regexp.Regexp // nil: any text
	min, max string
}

var (
	digits  = regexp.MustCompile(`^[0-9]+$`)
	integer = regexp.MustCompile(`^[+-]?[0-9]+$`)
)

// headerRules are those of the protocol, written down once more.
var headerRules = map[string]headerRule{
	"worker":         {[]string{"X-Dynamo-Worker-Instance-Id", "X-Worker-Instance-Id"}, nvext.Pins, digits, "0", "18446744073709551615"},
	"prefill worker": {[]string{"X-Dynamo-Prefill-Instance-Id", "X-Prefill-Instance-Id"}, nvext.Pins, digits, "0", "18446744073709551615"},
	"rank":           {[]string{"X-Dynamo-Dp-Rank", "X-Dp-Rank", "X-Data-Parallel-Rank"}, nvext.Pins, digits, "0", "4294967295"},
	"prefill rank":   {[]string{"X-Dynamo-Prefill-Dp-Rank", "X-Prefill-Dp-Rank"}, nvext.Pins, digits, "0", "4294967295"},
	"priority":       {[]string{"X-Dynamo-Request-Priority"}, nvext.Priorities, integer, "-2147483648", "2147483647"},
	"strict":         {[]string{"X-Dynamo-Request-Strict-Priority"}, nvext.Priorities, digits, "0", "4294967295"},
	"tenant":         {[]string{"X-Tenant-Id"}, nvext.Tenants, nil, "", ""},
}

// said returns what a rule's headers say, and whether that can be read; nothing
// if there is none.
func (r headerRule) said(h http.Header) (value string, there, good bool) {
	for _, name := range r.names {
		values := h[name]
		if len(values) == 0 {
			continue
		}
		value = values[0]
		if len(slices.Compact(slices.Sorted(slices.Values(values)))) > 1 {
			value = strings.Join(values, ", ")
		}
		value = strings.TrimSpace(value)
		if r.form == nil {
			if len(value) > nvext.MaxText {
				value = fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(value)))
			}
			return value, true, true
		}
		if !r.form.MatchString(value) {
			return value, true, false
		}
		n, _ := new(big.Int).SetString(value, 10)
		lo, _ := new(big.Int).SetString(r.min, 10)
		hi, _ := new(big.Int).SetString(r.max, 10)
		return n.String(), true, n.Cmp(lo) >= 0 && n.Cmp(hi) <= 0
	}
	return "", false, false
}

// shownField returns a field as a text, "-" if it is absent.
func shownField[T uint64 | uint32 | int32](o nvext.Opt[T]) string {
	if !o.Set {
		return "-"
	}
	if n := int64(o.Value); n < 0 && reflect.TypeFor[T]().Kind() == reflect.Int32 {
		return big.NewInt(n).String()
	}
	return new(big.Int).SetUint64(uint64(o.Value)).String()
}

// fieldsOf returns the fields that headers set.
func fieldsOf(e *nvext.Ext) map[string]string {
	return map[string]string{
		"worker": shownField(e.BackendInstanceID) + " " + shownField(e.DecodeWorkerID), "prefill worker": shownField(e.PrefillWorkerID),
		"rank": shownField(e.DPRank), "prefill rank": shownField(e.PrefillDPRank),
		"priority": shownField(e.AgentHints.Priority), "strict": shownField(e.AgentHints.StrictPriority), "tenant": e.Tenant,
	}
}

// FuzzHeaders sends headers of any kind together with an nvext. A malformed header leaves the
// body's value. The router honours exactly what is granted.
func FuzzHeaders(f *testing.F) {
	for _, lines := range []string{
		"", "X-Worker-Instance-Id: 5", "X-Dynamo-Worker-Instance-Id: x\nX-Worker-Instance-Id: 5", "x-dp-rank: 4294967295\nX-Tenant-Id: t",
		"X-Tenant-Id: a\nX-Tenant-Id: b\nX-Dynamo-Request-Priority: +3\nX-Dynamo-Request-Strict-Priority: -1",
		"X-Dynamo-Meta-Policy-Class: gold\nX-Dynamo-Session-Id: s\nX-Dynamo-Session-Final: true\nConnection: close, X-Tenant-Id",
		"X-Data-Parallel-Rank: 1\nAuthorization: a\nX-Dynamo-Meta-: x\nX-Prefill-Dp-Rank: 18446744073709551616",
		"X-Worker-Instance-Id: 7\nX-Worker-Instance-Id: 7\nX-Dp-Rank: 0_1",
		"X-Tenant-Id: " + strings.Repeat("t", nvext.MaxText+1) + "\nX-Override-Priority: 9\nX-Override-Routed-Dp-Rank: 1\nX-Override-Rid: r",
	} {
		for _, raw := range []string{"", `{"backend_instance_id":1,"decode_worker_id":2,"prefill_worker_id":3,"dp_rank":4,"prefill_dp_rank":5,"agent_hints":{"priority":6,"strict_priority":7}}`} {
			for _, g := range []uint8{0, uint8(nvext.Everything), uint8(nvext.Priorities), uint8(nvext.Pins | nvext.Tenants)} {
				f.Add(lines, raw, g)
			}
		}
	}
	f.Fuzz(func(t *testing.T, lines, raw string, grants uint8) {
		header := http.Header{}
		for line := range strings.SplitSeq(lines, "\n") {
			if name, value, ok := strings.Cut(line, ":"); ok {
				header.Add(strings.TrimSpace(name), strings.TrimSpace(value)) // as the server has them
			}
		}
		g := nvext.Grants(grants) & nvext.Everything
		rd := testReader(g)
		var before nvext.Ext
		var body []byte
		if raw != "" {
			var err error
			body = []byte(raw)
			if before, err = nvext.Parse(body, rd.extOptions()); err != nil {
				return
			}
		}
		r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", http.NoBody)
		r.Header = header.Clone()
		p := &Plan{Wishes: Wishes{headers: headersNeed(r.Header)}}
		if err := rd.takeExt(r, p, body); err != nil {
			t.Fatalf("%q and %s: %v", lines, raw, err)
		}
		checkHonoured(t, header, &before, p, g)
		checkKept(t, header, p.WithoutRouting(r.Header), g)
		if !reflect.DeepEqual(r.Header, header) {
			t.Fatalf("the server's own header became %v", r.Header)
		}
	})
}

// checkHonoured checks what of the headers counts.
func checkHonoured(t *testing.T, header http.Header, before *nvext.Ext, p *Plan, g nvext.Grants) {
	t.Helper()
	want, got := fieldsOf(before), fieldsOf(p.Ext)
	var malformed []string
	for field, rule := range headerRules {
		value, there, good := rule.said(header)
		switch {
		case there && !good:
			for _, name := range rule.names {
				if len(header[name]) > 0 {
					malformed = append(malformed, name)
					break
				}
			}
		case !there, rule.max == "4294967295" && rule.grant == nvext.Pins && value == rule.max: // unset
		case field == "worker":
			want[field] = value + " " + value
		default:
			want[field] = value
		}
		if g&rule.grant == 0 {
			want[field] = map[string]string{"worker": "- -", "tenant": ""}[field]
			if field != "worker" && field != "tenant" {
				want[field] = "-"
			}
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%v: %v, want %v", header, got, want)
	}
	slices.Sort(malformed)
	if is := slices.Sorted(slices.Values(p.Malformed)); !slices.Equal(is, malformed) {
		t.Fatalf("%v: malformed are %v, want %v", header, is, malformed)
	}
}

// checkKept checks what of the headers goes on to an engine.
func checkKept(t *testing.T, header, kept http.Header, g nvext.Grants) {
	t.Helper()
	for name, values := range header {
		needs := nvext.Grants(0)
		switch {
		case strings.HasPrefix(name, "X-Dynamo-Meta-"):
			needs = nvext.Priorities
		case strings.HasPrefix(name, "X-Override-"):
			needs = nvext.Pins
		}
		routing := needs != 0
		for _, rule := range headerRules {
			if slices.Contains(rule.names, name) {
				needs, routing = rule.grant, true
			}
		}
		got, there := kept[name]
		switch {
		case needs == nvext.Pins || g&needs != needs:
			if there {
				t.Fatalf("%v: %s passes, with %v", header, name, g)
			}
		case routing && len(got) != 1, !routing && !slices.Equal(got, values):
			t.Fatalf("%v: %s became %q", header, name, got)
		}
	}
	for name := range kept {
		if _, there := header[name]; !there {
			t.Fatalf("%v: %s is new", header, name)
		}
	}
}
