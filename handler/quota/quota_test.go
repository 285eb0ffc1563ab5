package quota

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

func book(t testing.TB, limits ...string) *Book {
	t.Helper()
	return bookOf(t, &Settings{CachedWeight: 1, Default: parsed(t, limits...)})
}

func bookOf(t testing.TB, s *Settings) *Book {
	t.Helper()
	b := new(Book)
	b.Set(s)
	return b
}

// recorder gets the changes of a book's own.
type recorder func(now time.Time, c Change)

func (f recorder) Charged(now time.Time, c Change, remote bool) {
	if !remote {
		f(now, c)
	}
}

func (recorder) AccountState(time.Time, State) {}

func parsed(t testing.TB, texts ...string) (list []Limit) {
	t.Helper()
	for _, text := range texts {
		l, err := ParseLimit(text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, l)
	}
	if err := CheckLimits(list); err != nil {
		t.Fatal(err)
	}
	return list
}

func ask(name string, prompt, answer int64) *Ask {
	a := &Ask{Name: name, Tenant: Hash(name), Prompt: prompt, Answer: answer, Choices: 1}
	if answer == 0 { // as of an embedding
		a.Choices = 0
	}
	return a
}

// reserve reserves what must be granted.
func reserve(t testing.TB, b *Book, now time.Time, a *Ask) *Reservation {
	t.Helper()
	res, e := b.Reserve(now, a)
	if e != nil {
		t.Fatalf("%s: refused: %v", a.Name, e)
	}
	return res
}

// refuse reserves what must be refused.
func refuse(t testing.TB, b *Book, now time.Time, a *Ask) *Exceeded {
	t.Helper()
	_, e := b.Reserve(now, a)
	if e == nil {
		t.Fatalf("%s: granted", a.Name)
	}
	return e
}

// used returns what a tenant has used of its limits.
func used(t testing.TB, b *Book, now time.Time, name string) (list []int64) {
	t.Helper()
	s := b.Standing(now, math.MaxInt)
	for _, one := range s.Top {
		if one.Tenant == name {
			for _, l := range one.Limits {
				list = append(list, l.Used)
			}
		}
	}
	return list
}

func wantUsed(t testing.TB, b *Book, now time.Time, name string, want ...int64) {
	t.Helper()
	got := used(t, b, now, name)
	if got == nil {
		got = make([]int64, len(want))
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s has used %v, want %v", name, got, want)
	}
}

func reported(prompt, completion, cached int64) Usage {
	return Usage{Prompt: prompt, Completion: completion, Cached: cached, Whole: true}
}

func TestTokensComeBackBitByBit(t *testing.T) {
	b := book(t, "tokens 6000 per 1m")
	res := reserve(t, b, noon, ask("a", 5000, 1000))
	if n := res.Figures[Tokens]; n != (Figure{true, 6000, 744, 52560 * time.Millisecond}) {
		t.Errorf("figures: %+v", n) // 256 tokens are expected of a tenant that is new
	}
	res.Settle(noon, reported(5000, 1000, 0))
	wantUsed(t, b, noon, "a", 6000)
	if e := refuse(t, b, noon, ask("a", 100, 100)); e.Wait != 2*time.Second || !e.First {
		t.Errorf("refused for %v, first %v", e.Wait, e.First)
	}
	if e := refuse(t, b, noon.Add(time.Second), ask("a", 100, 100)); e.Wait != time.Second || e.First {
		t.Errorf("refused for %v, first %v", e.Wait, e.First)
	}
	reserve(t, b, noon.Add(2*time.Second), ask("a", 100, 100)).Drop(noon.Add(2 * time.Second))
	wantUsed(t, b, noon.Add(2*time.Second), "a", 5800)
	wantUsed(t, b, noon.Add(time.Minute), "a", 0)
	reserve(t, b, noon, ask("b", 6000, 1000))
}

func TestCalendarIsUTC(t *testing.T) {
	evening := time.Date(2026, 11, 30, 23, 0, 0, 0, time.FixedZone("", -2*3600)) // 01:00 UTC of December 1st
	b := book(t, "requests 2 per day", "requests 3 per month")
	for range 2 {
		reserve(t, b, evening, ask("a", 1, 1)).Refused(evening)
	}
	if e := refuse(t, b, evening, ask("a", 1, 1)); e.Wait != 23*time.Hour || e.Limit.Per != Day {
		t.Errorf("%+v", e)
	}
	next := evening.Add(23 * time.Hour)
	reserve(t, b, next, ask("a", 1, 1)).Refused(next)
	if e := refuse(t, b, next, ask("a", 1, 1)); e.Wait != 30*24*time.Hour || e.Limit.Per != Month {
		t.Errorf("%+v", e)
	}
}

// The next day gets no refund of a request that began before it.
func TestRefundAcrossMidnight(t *testing.T) {
	b := book(t, "tokens 10000 per day")
	late := reserve(t, b, noon, ask("a", 5000, 0))
	next := noon.Add(24 * time.Hour)
	reserve(t, b, next, ask("a", 3000, 0)).Settle(next, reported(3000, 0, 0))
	late.Settle(next, reported(10, 0, 0))
	wantUsed(t, b, next, "a", 3000)
}

func TestClockSetBack(t *testing.T) {
	b := book(t, "requests 1 per day")
	wrong := noon.Add(400 * 24 * time.Hour)
	reserve(t, b, wrong, ask("a", 1, 1)).Refused(wrong)
	reserve(t, b, noon, ask("a", 1, 1)).Refused(noon)
	refuse(t, b, noon, ask("a", 1, 1))
	midnight := noon.Add(12 * time.Hour)
	reserve(t, b, midnight, ask("a", 1, 1)).Refused(midnight)
	refuse(t, b, midnight.Add(-time.Minute), ask("a", 1, 1)) // it is no new day again
}

func TestConcurrentEndsOnce(t *testing.T) {
	b := book(t, "concurrent 2")
	one, two := reserve(t, b, noon, ask("a", 1, 1)), reserve(t, b, noon, ask("a", 1, 1))
	if e := refuse(t, b, noon, ask("a", 1, 1)); e.Wait != time.Second {
		t.Errorf("wait %v", e.Wait)
	}
	one.Drop(noon)
	one.Drop(noon)
	one.Settle(noon, Usage{})
	one.Refused(noon)
	reserve(t, b, noon, ask("a", 1, 1))
	refuse(t, b, noon, ask("a", 1, 1))
	two.Settle(noon, Usage{})
	reserve(t, b, noon, ask("a", 1, 1))
}

func TestSettle(t *testing.T) {
	for name, test := range map[string]struct {
		usage     Usage
		want      int64
		plausible bool
	}{
		"reported":                     {reported(900, 500, 0), 1400, true},
		"cached count less":            {reported(1000, 0, 600), 550, true},
		"more cached than prompt":      {reported(1000, 0, 6000), 250, true},
		"no usage, stream seen":        {Usage{-1, -1, -1, 70, true}, 1070, true},
		"aborted before its usage":     {Usage{-1, -1, -1, 30, false}, 1030, true},
		"left in the prefill":          {Usage{-1, -1, -1, 0, false}, 1000, true},
		"nothing of it could be read":  {Usage{-1, -1, -1, 0, true}, 1100, true},
		"negative":                     {Usage{-5, -7, -1, 40, true}, 1040, false},
		"huge":                         {Usage{1 << 62, 1 << 40, 1 << 50, 40, true}, 1040, false},
		"negative count of the cached": {reported(1000, 10, -9), 1010, false},
	} {
		b := bookOf(t, &Settings{CachedWeight: 0.25, Default: parsed(t, "tokens 1G per day")})
		res := reserve(t, b, noon, ask("a", 1000, 100))
		if got := res.Settle(noon, test.usage); got != test.plausible {
			t.Errorf("%s: plausible is %v", name, got)
		}
		if got := used(t, b, noon, "a"); len(got) != 1 || got[0] != test.want {
			t.Errorf("%s: used %v, want %d", name, got, test.want)
		}
	}
}

// A prompt that alone exceeds a limit is refused for good. An answer that might is not.
func TestTooLong(t *testing.T) {
	b := book(t, "tokens 1000 per 1m")
	if e := refuse(t, b, noon, ask("a", 1001, 1)); e.Wait != 0 || e.Needs != 1001 {
		t.Errorf("%+v", e)
	}
	reserve(t, b, noon, &Ask{Name: "a", Tenant: Hash("a"), Prompt: 999, Choices: 100}).Settle(noon, reported(999, 9001, 0))
	// the debt is paid before the next request
	if e := refuse(t, b, noon, ask("a", 500, 0)); e.Wait < 9*time.Minute {
		t.Errorf("wait %v", e.Wait)
	}
	b = book(t, "requests 0 per day")
	if e := refuse(t, b, noon, ask("a", 1, 1)); e.Wait != 0 || !strings.Contains(e.Error(), "requests 0 per day") {
		t.Errorf("%+v", e)
	}
}

// The expected answer follows the tenant's answers, and the client's limit.
func TestExpectedAnswer(t *testing.T) {
	b := book(t, "tokens 1M per 1m")
	for range 100 {
		reserve(t, b, noon, ask("a", 0, 1<<20)).Settle(noon, reported(0, 20, 0))
	}
	res := reserve(t, b, noon, ask("a", 0, 1<<20))
	if res.answer < 20 || res.answer > 25 {
		t.Errorf("expects %d", res.answer)
	}
	if res = reserve(t, b, noon, ask("a", 0, 5)); res.answer != 5 {
		t.Errorf("expects %d", res.answer)
	}
	if res = reserve(t, b, noon, &Ask{Tenant: Hash("a")}); res.answer != 0 {
		t.Errorf("expects %d of a request without an answer", res.answer)
	}
	if res = reserve(t, b, noon, &Ask{Tenant: Hash("b"), Prompt: -1, Answer: math.MaxInt64 / 2, Choices: 1 << 20}); res.answer < 1 || res.answer > maxUsage || res.prompt != 0 {
		t.Errorf("expects %d", res.answer)
	}
}

func TestLimitsOfTenantsAndClasses(t *testing.T) {
	s := &Settings{
		Default: parsed(t, "requests 1 per day"),
		Classes: map[string][]Limit{"batch": parsed(t, "requests 2 per day"), "chat": nil},
		Tenants: map[string]Tenant{"free": {Limits: []Limit{}}, "heavy": {Weight: 4}, "big": {Limits: parsed(t, "requests 3 per day")}},
	}
	b := bookOf(t, s)
	granted := func(name, class string) (n int) {
		for range 5 {
			if _, e := b.Reserve(noon, &Ask{Name: name, Tenant: Hash(name), Class: class}); e == nil {
				n++
			}
		}
		return n
	}
	for _, test := range []struct {
		name, class string
		want        int
	}{
		{"", "", 1},
		{"a", "", 1},
		{"a", "chat", 0},
		{"a", "batch", 2},
		{"free", "", 5},
		{"free", "batch", 2},
		{"heavy", "", 1},
		{"big", "chat", 3},
	} {
		if got := granted(test.name, test.class); got != test.want {
			t.Errorf("%s in %s: %d granted, want %d", test.name, test.class, got, test.want)
		}
	}
	if b.Weight(Hash("heavy")) != 4 || b.Weight(Hash("a")) != 1 || new(Book).Weight(1) != 1 {
		t.Error("wrong weights")
	}
	// new limits keep what was used
	s.Default = parsed(t, "tokens 5 per day", "requests 3 per day")
	b.Set(s)
	if got := granted("a", ""); got != 2 {
		t.Errorf("%d granted after the change", got)
	}
	b.Set(&Settings{})
	if res, e := b.Reserve(noon, ask("a", 1, 1)); res != nil || e != nil || b.Limits() {
		t.Error("limits without limits")
	}
}

// A nil reservation is that of a tenant without limits.
func TestNilReservation(t *testing.T) {
	var r *Reservation
	r.Drop(noon)
	r.Refused(noon)
	if !r.Settle(noon, Usage{}) {
		t.Error("not plausible")
	}
}

// A million names take bounded memory, and do not push out a tenant that uses much.
func TestManyTenants(t *testing.T) {
	b := book(t, "tokens 1M per day", "tokens 1000 per 1s", "concurrent 5")
	b.most = 4096
	reserve(t, b, noon, ask("heavy", 900, 0)).Settle(noon, reported(900, 0, 0))
	held := reserve(t, b, noon, ask("streams", 1, 0))
	for i := range 20_000 {
		reserve(t, b, noon, &Ask{Tenant: uint64(i) + 1<<32, Prompt: 1}).Settle(noon, reported(1, 0, 0))
	}
	if n := len(b.accounts); n > b.most {
		t.Fatalf("%d accounts", n)
	}
	wantUsed(t, b, noon, "heavy", 900, 900, 0)
	if b.forgotten == 0 {
		t.Error("none was forgotten")
	}
	held.Drop(noon)
	// on the next day they say nothing, and go as others come
	next := noon.Add(24 * time.Hour)
	for i := range 2_000 {
		reserve(t, b, next, &Ask{Tenant: uint64(i) + 1<<40, Prompt: 1}).Drop(next)
	}
	if n := len(b.accounts); n > 2_500 {
		t.Errorf("%d accounts on the next day", n)
	}
}

// Two routers that share their changes count what both have granted, also if their clocks differ.
func TestRouters(t *testing.T) {
	books := [2]*Book{book(t, "tokens 1M per day", "concurrent 3"), book(t, "tokens 1M per day", "concurrent 3")}
	for i := range books {
		books[i].Journal = recorder(func(now time.Time, c Change) {
			books[1-i].Apply(uint64(i+1), now.Add(time.Minute-time.Duration(2*i)*time.Minute), c)
		})
	}
	ahead := noon.Add(time.Minute)
	one := reserve(t, books[0], noon, ask("a", 1000, 0))
	two := reserve(t, books[1], ahead, ask("a", 2000, 0))
	reserve(t, books[1], ahead, ask("a", 0, 0))
	refuse(t, books[0], noon, ask("a", 0, 0))
	refuse(t, books[1], ahead, ask("a", 0, 0))
	wantUsed(t, books[0], noon, "a", 3000, 3)
	one.Settle(noon, reported(1500, 0, 0))
	two.Settle(ahead, reported(2500, 0, 0))
	wantUsed(t, books[0], noon, "a", 4000, 1)
	wantUsed(t, books[1], ahead, "a", 4000, 1)
	books[0].EndRouter(2) // it was killed: its request under way ends, its charge stays
	wantUsed(t, books[0], noon, "a", 4000, 0)
	books[0].EndRouter(2)

	// a third one joins, and gets the state of the tenants
	third := book(t, "tokens 1M per day", "concurrent 3")
	for range 2 { // by both
		books[1].States(ahead, 0, func(s *State) { third.Merge(noon, s) })
	}
	wantUsed(t, third, noon, "#"+fmt.Sprintf("%x", Hash("a")), 4000, 0)
	// what it hears of a day that has not begun here is of no use
	tomorrow := noon.Add(13 * time.Hour)
	reserve(t, books[1], tomorrow, ask("b", 7, 0))
	books[1].States(tomorrow, time.Minute, func(s *State) { third.Merge(noon, s) })
	if got := used(t, third, noon, "#"+fmt.Sprintf("%x", Hash("b"))); fmt.Sprint(got) != "[]" {
		t.Errorf("of tomorrow: %v", got)
	}
}

// The changes of an earlier run lead to the same figures, and what was counted meanwhile is added.
func TestRestart(t *testing.T) {
	before, restored := book(t, "tokens 1M per day", "tokens 6000 per 1m"), book(t, "tokens 1M per day", "tokens 6000 per 1m")
	before.Journal = recorder(func(now time.Time, c Change) { restored.Apply(0, now.Round(time.Millisecond), c) })
	now := noon
	for range 20 {
		reserve(t, before, now, ask("a", 100, 0)).Settle(now.Add(time.Second), reported(150, 50, 0))
		now = now.Add(2 * time.Second)
	}
	reserve(t, before, now, ask("a", 70, 0)) // killed
	after := book(t, "tokens 1M per day", "tokens 6000 per 1m")
	now = now.Add(500 * time.Millisecond)
	reserve(t, after, now, ask("a", 30, 0)).Settle(now, reported(30, 0, 0))
	after.Restore(now, restored, false)
	wantUsed(t, after, now, "a", 4100, 50) // 70 less 50, and 30
}

// Hostile changes of a router break nothing.
func TestHostileChanges(t *testing.T) {
	b := book(t, "tokens 1M per day", "requests 5 per 1m", "concurrent 3")
	r := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		c := Change{Key{1, r.Uint64N(3)}, r.Int64() - math.MaxInt64/2, r.Int64() - math.MaxInt64/2, r.IntN(5) - 2, time.Duration(r.Int64())}
		at := noon.Add(time.Duration(r.Int64N(int64(48*time.Hour))) - 24*time.Hour)
		b.Apply(r.Uint64N(4), at, c)
		b.Merge(at, &State{c.Key, []Level{{Tokens, Day, c.Tokens, c.Requests}, {9, 9, 9, 9}}})
	}
	for i := range uint64(4) {
		b.EndRouter(i)
	}
	for _, a := range b.accounts {
		if a.remote != 0 || a.running != 0 {
			t.Errorf("%d remote, %d running", a.remote, a.running)
		}
		for _, m := range a.meters {
			if !(m.used >= 0) || math.IsInf(m.used, 0) {
				t.Errorf("used %v", m.used)
			}
		}
	}
}

func TestHeaders(t *testing.T) {
	b := book(t, "tokens 2M per 1m", "tokens 1M per day", "requests 600 per 1m", "concurrent 9")
	res := reserve(t, b, noon, ask("a", 1000, 10))
	got := ""
	res.Headers(func(name, value string) { got += name + ": " + value + "\n" })
	want := `X-Ratelimit-Limit-Requests: 600
X-Ratelimit-Remaining-Requests: 599
X-Ratelimit-Reset-Requests: 100ms
X-Ratelimit-Limit-Tokens: 1000000
X-Ratelimit-Remaining-Tokens: 998990
X-Ratelimit-Reset-Tokens: 12h0m0s
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if got := shown(6 * time.Minute); got != "6m0s" {
		t.Error(got)
	}
}

func TestParseLimit(t *testing.T) {
	for text, want := range map[string]string{
		"tokens 2M per 1m": "", "requests 600 per 1m30s": "", "concurrent 64": "", "tokens 1500k per day": "",
		"tokens 0 per month": "", "tokens 1.5M per 60s": "tokens 1500k per 1m", "tokens 5000 per 24h": "tokens 5k per 24h",
	} {
		if want == "" {
			want = text
		}
		if l, err := ParseLimit(text); err != nil || l.String() != want {
			t.Errorf("%s: %v, %v", text, l, err)
		}
	}
	for _, text := range []string{
		"", "tokens", "tokens 5", "concurrent 5 per day", "tokens 5 in day", "dollars 5 per day", "tokens -1 per day", "tokens 1.5 per day",
		"tokens 5 per 1ms", "tokens 5 per 48h", "tokens 5 per -1m", "tokens NaN per day", "tokens Inf per day", "tokens 1e3 per day",
		"tokens 0x5 per day", "tokens 9999999G per day", "tokens 5 per day 3", "tokens 5 per week",
	} {
		if l, err := ParseLimit(text); err == nil {
			t.Errorf("%q is read as %v", text, l)
		}
	}
	if CheckLimits([]Limit{{Tokens, 5, Day}, {Tokens, 6, Day}}) == nil || CheckLimits(make([]Limit, 17)) == nil {
		t.Error("limits that contradict each other are taken")
	}
}

func TestParseTenants(t *testing.T) {
	got, err := ParseTenants([]byte(`{"alice": {"weight": 4, "limits": ["tokens 20M per 1m", "concurrent 256"]}, "bob": {"limits": []}, "": {}}`))
	if err != nil || len(got) != 3 || got["alice"].Weight != 4 || len(got["alice"].Limits) != 2 || got["bob"].Limits == nil || got[""].Limits != nil {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{
		``, `[]`, `{`, `{"a": 5}`, `{"a": {"limit": []}}`, `{"a": {}, "a": {}}`, `{"a": {"weight": -1}}`, `{"a": {"weight": 1e9}}`,
		`{"a": {"limits": ["tokens"]}}`, `{"a": {"limits": ["tokens 5 per day", "tokens 6 per day"]}}`, `{} {}`, `{"a": {}`, `{"` + strings.Repeat("a", 2000) + `": {}}`,
	} {
		if got, err := ParseTenants([]byte(text)); err == nil {
			t.Errorf("%.50s is read as %v", text, got)
		}
	}
}

func FuzzParseTenants(f *testing.F) {
	f.Add([]byte(`{"alice": {"weight": 4, "limits": ["tokens 20M per 1m", "concurrent 256"]}}`))
	f.Add([]byte(`{"a": {"limits": ["requests 1.5k per 1h30m"]}, "b": {}}`))
	f.Fuzz(func(t *testing.T, file []byte) {
		tenants, err := ParseTenants(file)
		if err != nil {
			return
		}
		for name, of := range tenants {
			for _, l := range of.Limits {
				if again, err := ParseLimit(l.String()); err != nil || again != l {
					t.Errorf("%q: %v is read again as %v, %v", name, l, again, err)
				}
			}
			b := bookOf(t, &Settings{Tenants: tenants})
			if res, _ := b.Reserve(noon, ask(name, 10, 10)); res != nil {
				res.Settle(noon, Usage{})
			}
		}
	})
}

func BenchmarkReserve(b *testing.B) {
	for _, limits := range [][]string{nil, {"tokens 1G per 1m"}, {"tokens 1G per 1m", "tokens 100G per day", "requests 100M per 1m", "concurrent 1000"}} {
		b.Run(fmt.Sprintf("limits=%d", len(limits)), func(b *testing.B) {
			of, now := book(b, limits...), noon
			asks := make([]*Ask, 1000)
			for i := range asks {
				asks[i] = ask(fmt.Sprint(i), 1000, 100)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				now = now.Add(time.Millisecond)
				res, _ := of.Reserve(now, asks[i%len(asks)])
				res.Settle(now, reported(1000, 50, 0))
			}
		})
	}
}

// The tenants that have used most come first.
func TestTopTenants(t *testing.T) {
	b := book(t, "requests 100 per day")
	for i, n := range rand.New(rand.NewPCG(1, 2)).Perm(50) { //nolint:gosec // a test
		for range n {
			reserve(t, b, noon, ask(fmt.Sprint(i), 1, 0))
		}
	}
	last := int64(50)
	for _, one := range b.Standing(noon, 5).Top {
		if last--; one.Limits[0].Used != last {
			t.Errorf("%s has used %d, want %d", one.Tenant, one.Limits[0].Used, last)
		}
	}
	if last != 45 || len(b.Standing(noon, 0).Top) != 0 {
		t.Errorf("the last one of the first five has used %d", last)
	}
}
