package handler

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Class is how urgent some requests are. Where requests wait, classes share the engines by
// their weights. The handlers of a pool should define a class alike.
type Class struct {
	// The name of the class, as metrics and the admin API show it. The class `default` is
	// that of the requests which no other class takes.
	Name string `json:"name,omitempty"`

	// The matchers of the class's requests. The classes are tried in their order, and the
	// first that matches counts. A class without matchers gets requests only from `demote_to`
	// of other classes. The class `default` has no matchers.
	//
	// The placeholders `{http.kv_router.model}` and `{http.kv_router.priority}` are known
	// to matchers. The latter is the client's `agent_hints.priority` or
	// `latency_sensitivity`, and 0 unless `trust` grants `priorities`.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// How soon the first token should come, from the time when the router has read the
	// request. Requests that are nearly equal in their claims go by it. Default: none.
	TTFT caddy.Duration `json:"ttft,omitempty"`

	// A placeholder with the request's own `ttft`: milliseconds, or a duration with its
	// unit, from 1 ms to 1 h. Other values count as none. Default: none.
	TTFTFrom string `json:"ttft_from,omitempty"`

	// The share of the class beside other classes while both have requests that wait.
	// Default: 1.
	Weight float64 `json:"weight,omitempty"`

	// Whether the class runs only in what other classes leave. Default: `false`.
	Background bool `json:"background,omitempty"`

	// What happens to a request if no worker is predicted to keep `ttft`: `serve` (it waits
	// all the same), `refuse` (429, with `Retry-After`), or `demote`. Default: `serve`.
	Late string `json:"late,omitempty"`

	// By which factor recent predictions of the class's first tokens may have been off, on average.
	// If they were off by more, they refuse and demote nothing. Default: 2.
	Tolerance float64 `json:"tolerance,omitempty"`

	// The class that a late request gets, for `demote`. Its own `late` does not count then.
	DemoteTo string `json:"demote_to,omitempty"`

	// The limits of each tenant in this class, in place of all other limits. What a tenant uses
	// in the class then counts here only. Default: none.
	Limits []quota.Limit `json:"limits,omitempty"`

	matchers caddyhttp.MatcherSets
	from     string // TTFTFrom's name
	class    *queue.Class
}

// defaultClass is the name of the class of requests that no other class takes.
const defaultClass = "default"

// lates are the values of Class.Late.
var lates = map[string]queue.Late{"": queue.Serve, "serve": queue.Serve, "refuse": queue.Refuse, "demote": queue.Demote}

func (h *Handler) checkWho() error {
	if _, ok := plan.PlaceholderName(h.Tenant); h.Tenant != "" && !ok {
		return fmt.Errorf("tenant: must be a placeholder such as {http.auth.user.id}, got %q", h.Tenant)
	}
	h.rest = &queue.Class{Name: defaultClass}
	named, demoted := make(map[string]*queue.Class), make(map[string]bool)
	for _, c := range h.Classes {
		switch {
		case c == nil || c.Name == "":
			return fmt.Errorf("class: a class must have a name")
		case named[c.Name] != nil:
			return fmt.Errorf("class %s: already specified", c.Name)
		}
		if err := c.check(); err != nil {
			return fmt.Errorf("class %s: %w", c.Name, err)
		}
		if named[c.Name] = c.class; c.Name == defaultClass {
			h.rest = c.class
		}
	}
	named[defaultClass] = h.rest
	for _, c := range h.Classes {
		if c.class.Late != queue.Demote {
			continue
		}
		if c.class.Demote = named[c.DemoteTo]; c.class.Demote == nil || c.DemoteTo == c.Name {
			return fmt.Errorf("class %s: late demote: must name another class, got %q", c.Name, c.DemoteTo)
		}
		demoted[c.DemoteTo] = true
	}
	for _, c := range h.Classes {
		if c.MatcherSetsRaw == nil && c.Name != defaultClass && !demoted[c.Name] {
			return fmt.Errorf("class %s: gets no requests: it needs match, unless another class demotes to it", c.Name)
		}
	}
	return nil
}

func (c *Class) check() error {
	late, ok := lates[c.Late]
	from, single := plan.PlaceholderName(c.TTFTFrom)
	switch {
	case c.Name == defaultClass && c.MatcherSetsRaw != nil:
		return fmt.Errorf("match: must not be there, it takes what no other class takes")
	case c.TTFT < 0:
		return fmt.Errorf("ttft: must be positive, got %s", time.Duration(c.TTFT))
	case c.TTFTFrom != "" && !single:
		return fmt.Errorf("ttft: must be a duration, or a placeholder such as {http.request.header.X-SLO-TTFT-MS}, got %q", c.TTFTFrom)
	case !(c.Weight >= 0) || math.IsInf(c.Weight, 0):
		return fmt.Errorf("weight: must be positive, got %v", c.Weight)
	case !ok:
		return fmt.Errorf("late: must be serve, refuse or demote, got %q", c.Late)
	case late != queue.Serve && c.TTFT == 0 && c.TTFTFrom == "":
		return fmt.Errorf("late: %s needs a ttft", c.Late)
	case c.Tolerance != 0 && !(c.Tolerance > 1) || math.IsInf(c.Tolerance, 0):
		return fmt.Errorf("tolerance: must be more than 1, got %v", c.Tolerance)
	case c.DemoteTo != "" && late != queue.Demote:
		return fmt.Errorf("demote_to: needs late demote, got %q", c.DemoteTo)
	}
	c.from = from
	c.class = &queue.Class{
		Name: c.Name, Weight: c.Weight, Background: c.Background, TTFT: time.Duration(c.TTFT), Late: late, Tolerance: c.Tolerance,
	}
	return nil
}

func (h *Handler) loadMatchers(ctx caddy.Context) (err error) {
	load := func(of any, raw caddyhttp.RawMatcherSets, what string) (sets caddyhttp.MatcherSets) {
		if raw != nil && err == nil {
			var mods any
			if mods, err = ctx.LoadModule(of, "MatcherSetsRaw"); err == nil {
				err = sets.FromInterface(mods)
			}
			if err != nil {
				err = fmt.Errorf("%s: loading matchers: %w", what, err)
			}
		}
		return sets
	}
	for _, t := range h.Trust {
		t.matchers = load(t, t.MatcherSetsRaw, "trust")
	}
	for _, c := range h.Classes {
		c.matchers = load(c, c.MatcherSetsRaw, "class "+c.Name)
	}
	for _, w := range h.Workers {
		if w.IsBackup() {
			if h.backups == nil {
				h.backups = make(pool.Backups)
			}
			own := *w // other handlers may have the same
			h.backups[w.Dial] = load(&own, own.MatcherSetsRaw, "worker "+w.Dial)
		}
	}
	return err
}

// meets returns whether a request meets matchers. If they fail, it does not, and that is a condition.
func (h *Handler) meets(r *http.Request, sets caddyhttp.MatcherSets, incident string) bool {
	match, err := sets.AnyMatchWithError(r)
	if err != nil {
		h.pool.Raise(time.Now(), incident, err)
	}
	return match && err == nil
}

// classOf returns the class of a request, and the name of the placeholder with its own ttft, empty if
// there is none. A matcher that fails matches nothing.
func (h *Handler) classOf(r *http.Request) (class *queue.Class, from string) {
	for _, c := range h.Classes {
		if c.class == h.rest {
			from = c.from
		}
		if c.matchers != nil && h.meets(r, c.matchers, "a matcher of a class fails, and matches nothing") {
			return c.class, c.from
		}
	}
	return h.rest, from
}

func (h *Handler) unmarshalClass(d *caddyfile.Dispenser) error {
	c := new(Class)
	if !d.AllArgs(&c.Name) {
		return d.ArgErr()
	}
	h.Classes = append(h.Classes, c)
	return options{
		"match": repeated(func(d *caddyfile.Dispenser) error { return h.unmarshalMatch(d, &c.MatcherSetsRaw) }),
		"ttft":  c.unmarshalTTFT, "weight": &c.Weight, "background": &c.Background, "tolerance": &c.Tolerance,
		"limit": repeated(func(d *caddyfile.Dispenser) error { return addLimit(d, &c.Limits, d.RemainingArgs()) }),
		"late": func(d *caddyfile.Dispenser) error {
			if !d.Args(&c.Late) || c.Late == "demote" && !d.Args(&c.DemoteTo) || d.NextArg() {
				return d.ArgErr()
			}
			return nil
		},
	}.readBlock(d, "class option")
}

// unmarshalMatch reads matchers on one line or in a block, or the name of a named matcher.
func (h *Handler) unmarshalMatch(d *caddyfile.Dispenser, to *caddyhttp.RawMatcherSets) error {
	read := func() (caddy.ModuleMap, bool, error) {
		set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(d)
		return set, len(set) > 0, err
	}
	if d.NextArg() {
		if strings.HasPrefix(d.Val(), "@") && h.named != nil {
			read = h.named
		}
		d.Prev()
	}
	set, ok, err := read()
	switch {
	case err != nil:
		return d.WrapErr(err)
	case !ok || d.NextArg():
		return d.ArgErr()
	}
	*to = append(*to, set)
	return nil
}

// unmarshalTTFT reads a duration, a placeholder, or both.
func (c *Class) unmarshalTTFT(d *caddyfile.Dispenser) error {
	args := d.RemainingArgs()
	if n := len(args); n > 0 && strings.HasPrefix(args[n-1], "{") {
		c.TTFTFrom, args = args[n-1], args[:n-1]
	}
	switch {
	case len(args) > 1 || len(args) == 0 && c.TTFTFrom == "":
		return d.ArgErr()
	case len(args) == 1:
		if want := parse(args[0], &c.TTFT); want != "" {
			return d.Errf("ttft: must be %s, got '%s'", want, args[0])
		}
	}
	return nil
}

// backupsOf returns the ids of the backups that may get a request: those that the handler itself declares,
// and whose matchers the request meets. A matcher that fails matches nothing.
func (h *Handler) backupsOf(r *http.Request) (ids []uint64) {
	set := h.pool.Settings.Load()
	for dial, sets := range h.backups {
		w := set.Worker(dial)
		if w.IsBackup() && h.meets(r, sets, "a matcher of a backup fails, and matches nothing") {
			ids = append(ids, w.ID)
		}
	}
	slices.Sort(ids) // requests with equal needs wait together
	return ids
}
