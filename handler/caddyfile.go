package handler

import (
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
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
	hd := new(Handler)
	if err := hd.UnmarshalCaddyfile(h.Dispenser); err != nil {
		return nil, err
	}
	if hd.ReverseProxy == nil {
		return hd, nil
	}
	// handle_response routes are parsed last, by the server's own parser
	return hd, hd.ReverseProxy.FinalizeUnmarshalCaddyfile(h)
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	kv_router [<matcher>] [<upstreams...>] {
//		pool <name>
//		engine auto|vllm|sglang|trtllm|llamacpp|dynamo|other
//		policy <name> {
//			<options of the policy>
//		}
//		shadow <name> {
//			<options of the policy>
//		}
//		worker <dial>|* {
//			id <number>
//			engine <type>
//			dp_size <ranks>
//			kv_tokens <tokens>
//			max_running <requests>
//			models <names...>
//			api_key <key>
//			priority on|off|auto
//			thinking_budget on|off|auto
//			cache_salt on|off|auto
//			dynamo_instance_id <id>
//			drain
//			taints <names...>
//			role both
//		}
//		index {
//			memory <size>
//			block_size <tokens>
//			text_block <bytes>
//		}
//		affinity {
//			mode soft|hard|off
//			ttl <duration>
//			max_sessions <number>
//			key nvext|header:<name>|body:<member>...
//		}
//		queue {
//			max_waiting <requests>
//			max_wait <duration>
//		}
//		timeouts {
//			first_token <duration>
//			stream_idle <duration>
//		}
//		retry_budget <percent>% <retries>/s
//		trust pins|priorities|overrides|tenants|uploads|explain... {
//			<request matchers>
//		}
//		nvext strict
//		cache_salt enforce
//		mode direct
//		usage inject
//		speculative_prefill on|off
//		merge_models true|false
//		max_body <size>
//		response_headers <prefix>
//		reverse_proxy [<upstreams...>] {
//			<everything of reverse_proxy but lb_policy>
//		}
//	}
//
// Upstreams on the first line are short for those of the reverse_proxy block;
// they exclude each other.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the directive's name
	line := []caddyfile.Token{d.Token()}
	for d.NextArg() {
		line = append(line, d.Token())
	}
	if len(line) > 1 {
		h.ReverseProxy = new(reverseproxy.Handler)
		if err := h.ReverseProxy.UnmarshalCaddyfile(caddyfile.NewDispenser(line)); err != nil {
			return err
		}
	}
	seen := make(map[string]bool)
	for d.NextBlock(0) {
		name := d.Val()
		if seen[name] && name != "worker" && name != "trust" {
			return d.Errf("%s already specified", name)
		}
		seen[name] = true
		if err := h.unmarshalOption(d, name); err != nil {
			return err
		}
	}
	return nil
}

func (h *Handler) unmarshalOption(d *caddyfile.Dispenser, name string) error {
	switch name {
	case "pool":
		return stringArg(d, &h.Pool)
	case "engine":
		return stringArg(d, &h.Engine)
	case "max_body":
		return sizeArg(d, &h.MaxBody)
	case "merge_models":
		h.MergeModels = new(bool)
		return boolArg(d, h.MergeModels)
	case "usage":
		return stringArg(d, &h.Usage)
	case "speculative_prefill":
		return onOffArg(d, &h.SpeculativePrefill)
	case "response_headers":
		return stringArg(d, &h.ResponseHeaders)
	case "policy":
		return unmarshalPolicy(d, &h.PolicyRaw)
	case "shadow":
		return unmarshalPolicy(d, &h.ShadowRaw)
	case "worker":
		return h.unmarshalWorker(d)
	case "index":
		return h.unmarshalIndex(d)
	case "affinity":
		return h.unmarshalAffinity(d)
	case "queue":
		return h.unmarshalQueue(d)
	case "timeouts":
		return h.unmarshalTimeouts(d)
	case "retry_budget":
		return h.unmarshalRetryBudget(d)
	case "trust":
		return h.unmarshalTrust(d)
	case "nvext":
		return stringArg(d, &h.NVExt)
	case "cache_salt":
		return stringArg(d, &h.CacheSalt)
	case "mode":
		return stringArg(d, &h.Mode)
	case "reverse_proxy":
		return h.unmarshalProxy(d)
	}
	return d.Errf("unrecognized subdirective '%s'", name)
}

func (h *Handler) unmarshalProxy(d *caddyfile.Dispenser) error {
	if h.ReverseProxy != nil {
		return d.Err("upstreams on kv_router's own line and a reverse_proxy block exclude each other")
	}
	h.ReverseProxy = new(reverseproxy.Handler)
	// the proxy's unmarshaler expects its name first and its block at nesting 0
	if err := h.ReverseProxy.UnmarshalCaddyfile(d.NewFromNextSegment()); err != nil {
		return err
	}
	if lb := h.ReverseProxy.LoadBalancing; lb != nil && lb.SelectionPolicyRaw != nil {
		return d.WrapErr(errLBPolicy)
	}
	return nil
}

// unmarshalPolicy reads a policy's name and its options.
func unmarshalPolicy(d *caddyfile.Dispenser, to *json.RawMessage) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	name := d.Val()
	mod, err := caddyfile.UnmarshalModule(d, policyNamespace+"."+name)
	if err != nil {
		return err
	}
	*to = caddyconfig.JSONModuleObject(mod, "policy", name, nil)
	return nil
}

func (h *Handler) unmarshalWorker(d *caddyfile.Dispenser) error {
	w := new(pool.WorkerSettings)
	if err := stringArg(d, &w.Dial); err != nil {
		return err
	}
	h.Workers = append(h.Workers, w)
	return readOptions(d, "worker option", func(name string) error {
		switch name {
		case "id":
			return uintArg(d, &w.ID)
		case "engine":
			return stringArg(d, &w.Engine)
		case "dp_size":
			return intArg(d, &w.DPSize)
		case "kv_tokens":
			return intArg(d, &w.KVTokens)
		case "max_running":
			return intArg(d, &w.MaxRunning)
		case "models":
			return namesArg(d, &w.Models)
		case "taints":
			return namesArg(d, &w.Taints)
		case "role":
			return stringArg(d, &w.Role)
		case "api_key":
			return stringArg(d, &w.APIKey)
		case "priority":
			return stringArg(d, &w.Priority)
		case "thinking_budget":
			return stringArg(d, &w.ThinkingBudget)
		case "cache_salt":
			return stringArg(d, &w.CacheSalt)
		case "dynamo_instance_id":
			return uintArg(d, &w.DynamoInstanceID)
		case "drain":
			w.Drain = true
			return noArg(d)
		}
		return errUnknownOption
	})
}

func (h *Handler) unmarshalIndex(d *caddyfile.Dispenser) error {
	h.Index = new(Index)
	return readOptions(d, "index option", func(name string) error {
		switch name {
		case "memory":
			return sizeArg(d, &h.Index.Memory)
		case "block_size":
			return intArg(d, &h.Index.BlockSize)
		case "text_block":
			return intArg(d, &h.Index.TextBlock)
		}
		return errUnknownOption
	})
}

func (h *Handler) unmarshalAffinity(d *caddyfile.Dispenser) error {
	h.Affinity = new(Affinity)
	return readOptions(d, "affinity option", func(name string) error {
		switch name {
		case "mode":
			return stringArg(d, &h.Affinity.Mode)
		case "ttl":
			return durationArg(d, &h.Affinity.TTL)
		case "max_sessions":
			return intArg(d, &h.Affinity.MaxSessions)
		case "key":
			return namesArg(d, &h.Affinity.Key)
		}
		return errUnknownOption
	})
}

func (h *Handler) unmarshalQueue(d *caddyfile.Dispenser) error {
	h.Queue = new(Queue)
	return readOptions(d, "queue option", func(name string) error {
		switch name {
		case "max_waiting":
			return intArg(d, &h.Queue.MaxWaiting)
		case "max_wait":
			return durationArg(d, &h.Queue.MaxWait)
		}
		return errUnknownOption
	})
}

func (h *Handler) unmarshalTimeouts(d *caddyfile.Dispenser) error {
	h.Timeouts = new(dispatch.Timeouts)
	return readOptions(d, "timeouts option", func(name string) error {
		switch name {
		case "first_token":
			return durationArg(d, &h.Timeouts.FirstToken)
		case "stream_idle":
			return durationArg(d, &h.Timeouts.StreamIdle)
		}
		return errUnknownOption
	})
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
	h.RetryBudget = &RetryBudget{Percent: p, PerSecond: r}
	return nil
}

// errUnknownOption is what readOptions is told of an option that there is not.
var errUnknownOption = errors.New("unknown option")

// readOptions reads a block of options, one after the other. what says in errors
// which options they are.
func readOptions(d *caddyfile.Dispenser, what string, option func(name string) error) error {
	if err := noArg(d); err != nil {
		return err
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name := d.Val()
		switch err := option(name); {
		case errors.Is(err, errUnknownOption):
			return d.Errf("unrecognized %s '%s'", what, name)
		case err != nil:
			return err
		}
	}
	return nil
}

func noArg(d *caddyfile.Dispenser) error {
	if d.NextArg() {
		return d.ArgErr()
	}
	return nil
}

// namesArg adds one name or more.
func namesArg(d *caddyfile.Dispenser, to *[]string) error {
	if *to = append(*to, d.RemainingArgs()...); len(*to) == 0 {
		return d.ArgErr()
	}
	return nil
}

func stringArg(d *caddyfile.Dispenser, to *string) error {
	if !d.AllArgs(to) {
		return d.ArgErr()
	}
	return nil
}

func intArg[T int | int64](d *caddyfile.Dispenser, to *T) error {
	name := d.Val()
	var arg string
	if err := stringArg(d, &arg); err != nil {
		return err
	}
	n, err := strconv.ParseInt(arg, 10, 64)
	if err != nil || n <= 0 {
		return d.Errf("%s: must be a positive whole number, got '%s'", name, arg)
	}
	*to = T(n)
	return nil
}

func uintArg(d *caddyfile.Dispenser, to *uint64) error {
	name := d.Val()
	var arg string
	if err := stringArg(d, &arg); err != nil {
		return err
	}
	n, err := strconv.ParseUint(arg, 10, 64)
	if err != nil || n == 0 {
		return d.Errf("%s: must be a positive whole number, got '%s'", name, arg)
	}
	*to = n
	return nil
}

func floatArg(d *caddyfile.Dispenser, to *float64) error {
	name := d.Val()
	var arg string
	if err := stringArg(d, &arg); err != nil {
		return err
	}
	f, err := strconv.ParseFloat(arg, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return d.Errf("%s: must be a number, got '%s'", name, arg)
	}
	*to = f
	return nil
}

func boolArg(d *caddyfile.Dispenser, to *bool) error {
	name := d.Val()
	var arg string
	if err := stringArg(d, &arg); err != nil {
		return err
	}
	b, err := strconv.ParseBool(arg)
	if err != nil {
		return d.Errf("%s: must be true or false, got '%s'", name, arg)
	}
	*to = b
	return nil
}

func onOffArg(d *caddyfile.Dispenser, to *bool) error {
	name := d.Val()
	var arg string
	if err := stringArg(d, &arg); err != nil {
		return err
	}
	if arg != "on" && arg != "off" {
		return d.Errf("%s: must be on or off, got '%s'", name, arg)
	}
	*to = arg == "on"
	return nil
}

func sizeArg(d *caddyfile.Dispenser, to *int64) error {
	name := d.Val()
	var arg string
	if err := stringArg(d, &arg); err != nil {
		return err
	}
	n, err := humanize.ParseBytes(arg)
	if err != nil || n == 0 || n > 1<<62 {
		return d.Errf("%s: must be a size such as 64MiB, got '%s'", name, arg)
	}
	*to = int64(n)
	return nil
}

func durationArg(d *caddyfile.Dispenser, to *caddy.Duration) error {
	name := d.Val()
	var arg string
	if err := stringArg(d, &arg); err != nil {
		return err
	}
	dur, err := caddy.ParseDuration(arg)
	if err != nil || dur <= 0 {
		return d.Errf("%s: must be a positive duration, got '%s'", name, arg)
	}
	*to = caddy.Duration(dur)
	return nil
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
