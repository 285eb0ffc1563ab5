package handler

import (
	"errors"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(MatchModel{})
}

// MatchModel matches requests by the model that their body names, as JSON. A star in a name stands for any
// text, and the empty name for a body without a model. It reads bodies of up to 64 MiB; longer ones, and
// those that are not JSON, match nothing. What it has read is there for later handlers. The variable
// kv_router_model has the model from then on.
type MatchModel struct {
	Models []string `json:"models,omitempty"`

	patterns []*regexp.Regexp
}

func (MatchModel) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.matchers.kv_router_model", New: func() caddy.Module { return new(MatchModel) }}
}

func (m *MatchModel) Provision(caddy.Context) error {
	if len(m.Models) == 0 {
		return errors.New("kv_router_model: needs the name of a model, such as qwen*")
	}
	for _, name := range m.Models {
		p := strings.ReplaceAll(regexp.QuoteMeta(name), `\*`, `.*`)
		m.patterns = append(m.patterns, regexp.MustCompile(`^(?s:`+p+`)$`))
	}
	return nil
}

// UnmarshalCaddyfile reads the matcher:
//
//	kv_router_model <names...>
func (m *MatchModel) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	for d.Next() {
		names := d.RemainingArgs()
		if len(names) == 0 {
			return d.ArgErr()
		}
		m.Models = append(m.Models, names...)
		if d.NextBlock(0) {
			return d.Err("kv_router_model: takes no block")
		}
	}
	return nil
}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (m MatchModel) MatchWithError(r *http.Request) (bool, error) {
	model, known, err := modelOf(r)
	return known && slices.ContainsFunc(m.patterns, func(p *regexp.Regexp) bool { return p.MatchString(model) }), err
}

const (
	// varModel is false if the model is unknown.
	varModel = "kv_router_model"
	// mostMatched is the longest body that is read, in bytes.
	mostMatched = 64 << 20
)

// matching bounds the bodies that matchers have in memory.
var matching body.Memory

// modelOf returns the model that a request's body names, and whether that could be read. It reads the
// body once for all matchers of a request.
func modelOf(r *http.Request) (model string, known bool, err error) {
	switch found := caddyhttp.GetVar(r.Context(), varModel).(type) {
	case string:
		return found, true, nil
	case bool:
		return "", false, nil
	}
	caddyhttp.SetVar(r.Context(), varModel, false)
	if r.Body == nil || r.Body == http.NoBody || !body.IsJSON(body.MediaType(r.Header)) || r.ContentLength > mostMatched || !matching.HasRoom(r.ContentLength) {
		return "", false, nil
	}
	whole, rest, err := matching.Read(r.Body, r.ContentLength, mostMatched)
	if err != nil {
		refused := plan.Unreadable(nil, err)
		return "", false, caddyhttp.Error(refused.Status, refused.Err)
	}
	if whole == nil {
		body.GiveBack(r, nil, rest)
		return "", false, nil
	}
	all := body.NewReplay(whole, whole.Data)
	if req, err := api.Parse(plan.OrUnplanned(nil), all.Data, api.Options{}); err == nil {
		model, known = strings.Clone(req.Model), true
		caddyhttp.SetVar(r.Context(), varModel, model)
		req.Done()
	}
	body.GiveBack(r, all, nil)
	all.Done()
	return model, known, nil
}

// Interface guards
var (
	_ caddy.Provisioner                 = (*MatchModel)(nil)
	_ caddyfile.Unmarshaler             = (*MatchModel)(nil)
	_ caddyhttp.RequestMatcherWithError = MatchModel{}
)
