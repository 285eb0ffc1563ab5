package handler

import (
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/dustin/go-humanize"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("kv_router", parseCaddyfile)
	httpcaddyfile.RegisterDirectiveOrder("kv_router", httpcaddyfile.Before, "reverse_proxy")
}

func parseCaddyfile(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	hd := &Handler{named: h.MatcherToken}
	own, err := hd.unmarshal(h.Dispenser)
	if err != nil {
		return nil, err
	}
	if blocks, ok := h.Option("kv_router").(globalBlocks); ok {
		if err := hd.inherit(h, blocks, own); err != nil {
			return nil, err
		}
	}
	if hd.ReverseProxy == nil {
		return hd, nil
	}
	// handle_response routes are parsed last, by the server's own parser
	return hd, hd.ReverseProxy.FinalizeUnmarshalCaddyfile(h)
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. docs/configuration.md has the
// syntax. Upstreams on the first line are short for those of the reverse_proxy block.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	_, err := h.unmarshal(d)
	return err
}

// unmarshal returns the names of the options that it has read.
func (h *Handler) unmarshal(d *caddyfile.Dispenser) (own map[string]bool, err error) {
	d.Next() // the directive's name
	line := []caddyfile.Token{d.Token()}
	for d.NextArg() {
		line = append(line, d.Token())
	}
	if len(line) > 1 {
		h.ReverseProxy = new(reverseproxy.Handler)
		if err := h.ReverseProxy.UnmarshalCaddyfile(caddyfile.NewDispenser(line)); err != nil {
			return nil, err
		}
	}
	return h.options().readAll(d, 0, subdirective)
}

func (h *Handler) options() options {
	return options{
		"pool": &h.Pool, "engine": &h.Engine, "max_body": size{&h.MaxBody}, "response_headers": &h.ResponseHeaders,
		"server_timing": &h.ServerTiming, "cache_status": &h.CacheStatus,
		"split": &h.Split, "keepalive": orOff{&h.Keepalive},
		"enforce_cache_salt": &h.EnforceCacheSalt, "require_pin": &h.RequirePin,
		"inject_usage": &h.InjectUsage, "speculative_prefill": &h.SpeculativePrefill,
		"policy": policy{&h.PolicyRaw}, "shadow": policy{&h.ShadowRaw},
		"journal": h.unmarshalJournal, "share": h.unmarshalShare,
		"tenant": &h.Tenant, "class": repeated(h.unmarshalClass),
		"worker": repeated(h.unmarshalWorker), "trust": repeated(h.unmarshalTrust),
		"limit": repeated(h.unmarshalLimit), "model": repeated(h.unmarshalModel), "retry_budget": h.unmarshalRetryBudget, "reverse_proxy": h.unmarshalProxy,
		"index": func(d *caddyfile.Dispenser) error {
			h.Index = new(pool.Index)
			return options{
				"memory": size{&h.Index.Memory}, "block_size": &h.Index.BlockSize, "text_block": &h.Index.TextBlock,
			}.readBlock(d, "index option")
		},
		"affinity": func(d *caddyfile.Dispenser) error {
			h.Affinity = new(Affinity)
			return options{
				"mode": &h.Affinity.Mode, "ttl": &h.Affinity.TTL, "max_sessions": &h.Affinity.MaxSessions, "key": &h.Affinity.Key,
				"scope": &h.Affinity.Scope,
			}.readBlock(d, "affinity option")
		},
		"queue": func(d *caddyfile.Dispenser) error {
			h.Queue = new(pool.Queue)
			return options{"max_waiting": &h.Queue.MaxWaiting, "max_wait": &h.Queue.MaxWait, "hold": &h.Queue.Hold, "overflow_after": &h.Queue.OverflowAfter}.readBlock(d, "queue option")
		},
		"resume": func(d *caddyfile.Dispenser) error {
			h.Resume = new(resume.Config)
			if d.NextArg() {
				if h.Resume.Mode = d.Val(); !slices.Contains(resume.Modes, h.Resume.Mode) {
					return d.Errf("resume: must be on, exact or off, got '%s'", h.Resume.Mode)
				}
			}
			return options{"tokens": &h.Resume.Tokens, "tries": &h.Resume.Tries}.readBlock(d, "resume option")
		},
		"timeouts": func(d *caddyfile.Dispenser) error {
			h.Timeouts = new(attempt.Timeouts)
			return options{
				"first_token": &h.Timeouts.FirstToken, "stream_idle": &h.Timeouts.StreamIdle,
			}.readBlock(d, "timeouts option")
		},
	}
}

func (h *Handler) unmarshalProxy(d *caddyfile.Dispenser) error {
	if h.ReverseProxy != nil {
		return d.Err("upstreams on kv_router's own line and a reverse_proxy block exclude each other")
	}
	h.ReverseProxy = new(reverseproxy.Handler)
	// the proxy's unmarshaler expects its name first and its block at nesting 0
	block := d.NewFromNextSegment()
	if err := h.ReverseProxy.UnmarshalCaddyfile(block); err != nil {
		return err
	}
	if lb := h.ReverseProxy.LoadBalancing; lb != nil && lb.SelectionPolicyRaw != nil {
		for block.Reset(); block.Next() && block.Val() != "lb_policy"; {
		}
		return block.WrapErr(errLBPolicy) // at its own line
	}
	return nil
}

func (h *Handler) unmarshalWorker(d *caddyfile.Dispenser) error {
	w := new(worker.Settings)
	if !d.AllArgs(&w.Dial) {
		return d.ArgErr()
	}
	h.Workers = append(h.Workers, w)
	return options{
		"id": &w.ID, "engine": &w.Engine, "dp_size": &w.DPSize, "kv_tokens": &w.KVTokens, "max_running": &w.MaxRunning,
		"models": &w.Models, "role": &w.Role, "mooncake_port": &w.MooncakePort, "taints": &w.Taints,
		"api_key": &w.APIKey, "drain": &w.Drain, "dynamo_instance_id": &w.DynamoInstanceID, "priority": onOffAuto{&w.Priority},
		"thinking_budget": onOffAuto{&w.ThinkingBudget}, "cache_salt": onOffAuto{&w.CacheSalt},
		"sessions": onOffAuto{&w.Sessions}, "engine_load": &w.EngineLoad, "model": &w.Model, "wake": &w.Wake,
		"match": repeated(func(d *caddyfile.Dispenser) error { return h.unmarshalMatch(d, &w.MatcherSetsRaw) }),
		"header": repeated(func(d *caddyfile.Dispenser) error {
			var name, value string
			if !d.AllArgs(&name, &value) {
				return d.ArgErr()
			}
			if w.Headers == nil {
				w.Headers = make(map[string]string)
			}
			w.Headers[name] = value
			return nil
		}),
		"kv_events": func(d *caddyfile.Dispenser) error {
			w.KVEvents = new(worker.KVEventsSettings)
			if !d.AllArgs(&w.KVEvents.Source) {
				return d.ArgErr()
			}
			return options{
				"replay": &w.KVEvents.Replay, "topic": &w.KVEvents.Topic,
			}.readBlock(d, "worker kv_events option")
		},
	}.readBlock(d, "worker option")
}

func (h *Handler) unmarshalModel(d *caddyfile.Dispenser) error {
	h.Models = append(h.Models, plan.PublicModel{})
	m := &h.Models[len(h.Models)-1]
	if !d.AllArgs(&m.Name) {
		return d.ArgErr()
	}
	return options{"to": repeated(func(d *caddyfile.Dispenser) error {
		args := d.RemainingArgs()
		if len(args) != 1 && (len(args) != 3 || args[1] != "weight") {
			return d.ArgErr()
		}
		to := plan.EngineModel{Model: args[0]}
		if len(args) == 3 {
			n, err := strconv.ParseUint(args[2], 10, 32)
			if err != nil {
				return d.Errf("weight: must be a whole number, got '%s'", args[2])
			}
			weight := uint32(n)
			to.Weight = &weight
		}
		m.To = append(m.To, to)
		return nil
	})}.readBlock(d, "model option")
}

func (h *Handler) unmarshalJournal(d *caddyfile.Dispenser) error {
	h.Journal = new(pool.Journal)
	if d.NextArg() {
		if want := parse(d.Val(), &h.Journal.Enabled); want != "" {
			return d.Errf("journal: must be %s, got '%s'", want, d.Val())
		}
	}
	return options{"file": &h.Journal.File, "max_size": size{&h.Journal.MaxSize}}.readBlock(d, "journal option")
}

func (h *Handler) unmarshalShare(d *caddyfile.Dispenser) error {
	h.Share = &pool.Share{Servers: d.RemainingArgs()}
	if len(h.Share.Servers) == 0 {
		return d.ArgErr()
	}
	return options{
		"username": &h.Share.Username, "password": &h.Share.Password, "prefix": &h.Share.Prefix,
		"tls_ca": &h.Share.CA, "tls_cert": &h.Share.Cert, "tls_key": &h.Share.Key,
	}.readBlock(d, "share option")
}

func (h *Handler) unmarshalRetryBudget(d *caddyfile.Dispenser) error {
	var share, rate string
	if !d.AllArgs(&share, &rate) {
		return d.ArgErr()
	}
	percent, isPercent := strings.CutSuffix(share, "%")
	perSecond, isRate := strings.CutSuffix(rate, "/s")
	p, errP := strconv.ParseFloat(percent, 64)
	r, errR := strconv.ParseFloat(perSecond, 64)
	if !isPercent || !isRate || errP != nil || errR != nil {
		return d.Errf("retry_budget: must be like '20%% 10/s', got '%s %s'", share, rate)
	}
	h.RetryBudget = &pool.RetryBudget{Percent: p, PerSecond: r}
	return nil
}

// options says by name where the value of each option of a block goes. A place is a pointer,
// one of the types below, or a function that reads the option itself. Numbers and durations
// must be positive, except *float64. Booleans and onOffAuto are on if they have no argument.
type options map[string]any

type (
	size      struct{ *int64 } // bytes, such as 64MiB
	onOffAuto struct{ *string }
	orOff     struct{ *caddy.Duration } // negative is off
	policy    struct{ *json.RawMessage }
	repeated  func(*caddyfile.Dispenser) error // the option may occur several times
)

const on, off, subdirective = "on", "off", "subdirective"

// readBlock reads a block of options. what names their kind in errors.
func (o options) readBlock(d *caddyfile.Dispenser, what string) error {
	if d.NextArg() {
		return d.ArgErr()
	}
	_, err := o.readAll(d, d.Nesting(), what)
	return err
}

// readAll reads the options of a block at a level of nesting, and returns their names. Options with one
// value occur once.
func (o options) readAll(d *caddyfile.Dispenser, nesting int, what string) (seen map[string]bool, err error) {
	seen = make(map[string]bool)
	for d.NextBlock(nesting) {
		name := d.Val()
		switch o[name].(type) {
		case *[]string, repeated:
		default:
			if seen[name] {
				return nil, d.Errf("%s already specified", name)
			}
		}
		seen[name] = true
		if err := o.read(d, what); err != nil {
			return nil, err
		}
	}
	return seen, nil
}

func (o options) read(d *caddyfile.Dispenser, what string) error {
	name := d.Val()
	switch to := o[name].(type) {
	case nil:
		if what == subdirective {
			return d.Errf("unrecognized %s '%s': options of the proxy stand in a reverse_proxy block, those of workers in a worker block", what, name)
		}
		return d.Errf("unrecognized %s '%s'", what, name)
	case func(*caddyfile.Dispenser) error:
		return to(d)
	case repeated:
		return to(d)
	case policy:
		return to.read(d)
	case *[]string:
		if *to = append(*to, d.RemainingArgs()...); len(*to) == 0 {
			return d.ArgErr()
		}
		return nil
	default:
		arg, args := on, d.RemainingArgs()
		switch {
		case len(args) == 1:
			arg = args[0]
		case len(args) > 1 || !isSwitch(to):
			return d.ArgErr()
		}
		if want := parse(arg, to); want != "" {
			return d.Errf("%s: must be %s, got '%s'", name, want, arg)
		}
		return nil
	}
}

// isSwitch returns whether an option is on if it has no argument.
func isSwitch(to any) bool {
	switch to.(type) {
	case *bool, **bool, onOffAuto:
		return true
	}
	return false
}

func (p policy) read(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	name := d.Val()
	if _, err := caddy.GetModule(policyNamespace + "." + name); err != nil {
		known := make([]string, 0, 8)
		for _, m := range caddy.GetModules(policyNamespace) {
			known = append(known, m.ID.Name())
		}
		return d.Errf("policy: must be one of %s, got %q", strings.Join(known, ", "), name)
	}
	mod, err := caddyfile.UnmarshalModule(d, policyNamespace+"."+name)
	if err != nil {
		return err
	}
	*p.RawMessage = caddyconfig.JSONModuleObject(mod, "policy", name, nil)
	return nil
}

// parse sets to from arg. If it cannot, it returns what arg must be.
func parse(arg string, to any) (want string) {
	var err error
	ok := true
	switch to := to.(type) {
	case *string:
		*to = arg
	case *int, *int64, *uint64:
		err = json.Unmarshal([]byte(arg), to)
		want, ok = "a positive whole number", arg != "0" && arg != "null" && !strings.HasPrefix(arg, "-")
	case *float64:
		*to, err = strconv.ParseFloat(arg, 64)
		want, ok = "a number", !math.IsNaN(*to) && !math.IsInf(*to, 0)
	case *bool:
		*to = arg == on
		want, ok = "on or off", arg == on || arg == off
	case **bool:
		*to = new(bool)
		return parse(arg, *to)
	case onOffAuto:
		*to.string = arg
		want, ok = "on, off or auto", arg != "" && engine.Switch(arg).Known()
	case *worker.RequestLimit:
		*to, ok = worker.ParseRequestLimit(arg)
		want = "a positive whole number or auto"
	case size:
		var n uint64
		n, err = humanize.ParseBytes(arg)
		*to.int64 = int64(n) //nolint:gosec // checked below
		want, ok = "a size such as 64MiB", n > 0 && n <= 1<<62
	case orOff:
		if arg == off {
			*to.Duration = -1
			return ""
		}
		if parse(arg, to.Duration) != "" {
			want = "a positive duration or off"
		}
		return want
	case *caddy.Duration:
		var t time.Duration
		t, err = caddy.ParseDuration(arg)
		*to = caddy.Duration(t)
		want, ok = "a positive duration", t > 0
	}
	if err == nil && ok {
		return ""
	}
	return want
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
