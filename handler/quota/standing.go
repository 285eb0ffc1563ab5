package quota

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Headers passes the headers to set that say how the limits stand, named and formatted as OpenAI's.
func (f *Figures) Headers(set func(name, value string)) {
	for of := range f {
		if n := &f[of]; n.Set {
			h := &headers[of]
			set(h[0], strconv.FormatInt(n.Limit, 10))
			set(h[1], strconv.FormatInt(n.Remaining, 10))
			set(h[2], shown(n.Reset))
		}
	}
}

var headers = [2][3]string{
	Requests: {"X-Ratelimit-Limit-Requests", "X-Ratelimit-Remaining-Requests", "X-Ratelimit-Reset-Requests"},
	Tokens:   {"X-Ratelimit-Limit-Tokens", "X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Tokens"},
}

// shown returns a time such as 6m0s or 240ms.
func shown(d time.Duration) string {
	if d >= time.Second {
		return (d + time.Second - 1).Truncate(time.Second).String()
	}
	return (d + time.Millisecond - 1).Truncate(time.Millisecond).String()
}

// Standing is how the limits of all tenants stand.
type Standing struct {
	Tenants int `json:"tenants"` // with accounts
	// Forgotten are the accounts that were given up, because there were too many.
	Forgotten uint64            `json:"forgotten"`
	Refused   map[string]uint64 `json:"refused"` // requests, by the kind of the limit
	Top       []TenantStanding  `json:"top"`     // those that have used most of a limit
}

// TenantStanding is how the limits of one tenant stand.
type TenantStanding struct {
	// Tenant is its name, empty for requests without a tenant. It is the hash after # if only other
	// routers, or an earlier run, have seen the name.
	Tenant  string          `json:"tenant"`
	Running int             `json:"running"` // requests under way, at all routers
	Refused uint64          `json:"refused"` // by this router
	Limits  []LimitStanding `json:"limits"`
}

// String is a line such as "tenant a: 3 requests under way, 12 % of tokens 2M per 1m, 5 refused".
func (s *TenantStanding) String() string {
	text := fmt.Appendf(nil, "tenant %q: %d requests under way", s.Tenant, s.Running)
	for i := range s.Limits {
		l := &s.Limits[i]
		text = fmt.Appendf(text, ", %.0f %% of %s", 100*float64(l.Used)/float64(max(1, l.Limit.Amount)), l.Limit)
	}
	return string(fmt.Appendf(text, ", %d refused", s.Refused))
}

// LimitStanding is how one limit stands.
type LimitStanding struct {
	Limit Limit   `json:"limit"`
	Used  int64   `json:"used"`
	Reset float64 `json:"reset_seconds"` // until nothing of it is used
}

// Standing returns how the limits stand, with so many tenants.
func (b *Book) Standing(now time.Time, most int) *Standing {
	r := b.rules.Load()
	if r == nil || !r.any {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.moment(now)
	s := &Standing{Tenants: len(b.accounts), Forgotten: b.forgotten, Refused: make(map[string]uint64, units)}
	for of, n := range b.refused {
		s.Refused[Unit(of).String()] = n //nolint:gosec // one of three
	}
	type one struct {
		*account
		key  Key
		part float64
	}
	var top []one
	for k, a := range b.accounts {
		if most == 0 {
			break
		}
		a.follow(r, k)
		a.advance(t)
		part := a.used()
		if part == 0 || len(top) == most && part <= top[most-1].part {
			continue // to sort all would keep requests waiting
		}
		at, _ := slices.BinarySearchFunc(top, part, func(o one, part float64) int { return cmp.Compare(part, o.part) })
		top = slices.Insert(top, at, one{a, k, part})
		top = top[:min(most, len(top))]
	}
	for _, o := range top {
		s.Top = append(s.Top, o.standing(t, o.key))
	}
	return s
}

func (a *account) standing(t moment, k Key) TenantStanding {
	s := TenantStanding{Tenant: a.name, Running: a.running + a.remote, Refused: a.refused}
	if a.name == "" && k.Tenant != 0 {
		s.Tenant = "#" + strconv.FormatUint(k.Tenant, 16)
	}
	for i := range a.limits {
		l, m := &a.limits[i], &a.meters[i]
		one := LimitStanding{Limit: *l, Used: int64(m.used + 0.5), Reset: m.wait(l, t, 0).Seconds()}
		if l.Unit == Concurrent {
			one.Used, one.Reset = int64(s.Running), 0
		}
		s.Limits = append(s.Limits, one)
	}
	return s
}
