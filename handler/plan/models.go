package plan

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"mime"
	"net/http"
	"slices"
	"strings"
	"unicode"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/zeebo/xxh3"
)

// PublicModel is a name that clients use for a model, and the engines' models that it stands for.
type PublicModel struct {
	// The name that clients use, that answers carry, and that `GET /v1/models` lists in place of
	// the engines' names.
	Name string `json:"name,omitempty"`

	// The models that the name stands for. A session stays with one of them. Default: the
	// model of the same name.
	To []EngineModel `json:"to,omitempty"`
}

// EngineModel is a model as engines name it.
type EngineModel struct {
	// The name that engines know: a model or a LoRA adapter.
	Model string `json:"model,omitempty"`

	// Its share of the sessions, beside the weights of the others. With 0 it gets none.
	// Default: `1`.
	Weight *uint32 `json:"weight,omitempty"`
}

func (m *EngineModel) share() uint64 {
	if m.Weight == nil {
		return 1
	}
	return uint64(*m.Weight)
}

// PublicModels are the public names of models.
type PublicModels map[string]*PublicModel

// NewPublicModels checks public names, and completes them.
func NewPublicModels(list []PublicModel) (PublicModels, error) {
	all := make(PublicModels, len(list))
	for i := range list {
		m := &list[i]
		if len(m.To) == 0 {
			m.To = []EngineModel{{Model: m.Name}}
		}
		var sum uint64
		valid := isName(m.Name)
		for i := range m.To {
			sum += m.To[i].share()
			valid = valid && isName(m.To[i].Model)
		}
		switch {
		case !valid:
			return nil, fmt.Errorf("model %q: names must have 1 to %d bytes, and no control characters", m.Name, maxName)
		case sum == 0:
			return nil, fmt.Errorf("model %q: one weight must be above 0", m.Name)
		case all[m.Name] != nil:
			return nil, fmt.Errorf("model %q: specified twice", m.Name)
		}
		all[m.Name] = m
	}
	return all, nil
}

// List yields the public names in order, each with the engines' models that it stands for.
func (all PublicModels) List(yield func(name string, models []string) bool) {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		models := make([]string, 0, len(all[name].To))
		for i := range all[name].To {
			models = append(models, all[name].To[i].Model)
		}
		if !yield(name, models) {
			return
		}
	}
}

func isName(s string) bool {
	return s != "" && len(s) <= maxName && strings.IndexFunc(s, unicode.IsControl) < 0
}

// choose returns the model of the key's side. The side depends on nothing but the name, the key and the weights, so
// all routers agree. fits excludes models, unless it excludes all.
func (m *PublicModel) choose(key uint64, fits func(model string) bool) string {
	var sum uint64
	for i := range m.To {
		sum += m.To[i].share()
	}
	at, _ := bits.Mul64(xxh3.HashStringSeed(m.Name, key), sum)
	chosen := 0
	for ; at >= m.To[chosen].share(); chosen++ {
		at -= m.To[chosen].share()
	}
	if !fits(m.To[chosen].Model) {
		chosen = max(0, slices.IndexFunc(m.To, func(to EngineModel) bool { return fits(to.Model) }))
	}
	return m.To[chosen].Model
}

// Named returns the model's name as the client knows it; empty if the request names none.
func (p *Plan) Named() string { return cmp.Or(p.Public, p.Model) }

// standFor replaces a public name by a model that it stands for. The key decides which one, if there are several:
// that of the session, or else of the conversation.
func (rd *Reader) standFor(p *Plan, key func() uint64) {
	m := rd.Public[p.Model]
	if m == nil || p.Everywhere {
		return
	}
	if p.Public = m.Name; len(m.To) == 1 {
		p.Model = m.To[0].Model
		return
	}
	p.Model = m.choose(key(), func(model string) bool { return p.Response == "" || rd.KeeperServes(p.Response, model) })
}

// sessionKey returns what the side of an inference request depends on.
func (rd *Reader) sessionKey(r *http.Request, p *Plan) uint64 {
	if s, err := rd.Sessions.find(r, p.Request, p.Ext); err == nil && s.Rendezvous != 0 {
		return s.Rendezvous
	}
	return api.Opening(p.Body.Data)
}

// publicIn returns the longest public name in a path; empty if there is none.
func (rd *Reader) publicIn(path string) (name string) {
	for public := range rd.Public {
		if len(public) > len(name) && NameInPath(path, public).Len() > 0 {
			name = public
		}
	}
	return name
}

// NameInPath returns where a path names a model behind /models/ or /deployments/; the zero Span if it does not.
func NameInPath(path, name string) rawjson.Span {
	for _, before := range [...]string{"/models/", "/deployments/"} {
		i := strings.Index(path, before)
		if i < 0 || name == "" {
			continue
		}
		at := i + len(before)
		rest, ok := strings.CutPrefix(path[at:], name)
		if ok && (rest == "" || rest[0] == '/' || rest[0] == ':') { // such as m:predict
			return rawjson.Span{Start: at, End: at + len(name)}
		}
	}
	return rawjson.Span{}
}

// NameInPairs returns where a query, or a form like it, has the value of its first `model`; the zero Span if it has
// none.
func NameInPairs(pairs string) rawjson.Span {
	at := 0
	for pair := range strings.SplitSeq(pairs, "&") {
		if name, value, _ := strings.Cut(pair, "="); name == nameModel && value != "" {
			end := at + len(pair)
			return rawjson.Span{Start: end - len(value), End: end}
		}
		at += len(pair) + 1
	}
	return rawjson.Span{}
}

func (rd *Reader) standInForm(r *http.Request, p *Plan) {
	form := p.Body.Data
	if rd.Public[p.Model] == nil {
		return
	}
	if p.Form = modelInForm(r.Header.Get("Content-Type"), form, p.Model); p.Form.Len() > 0 {
		rd.standFor(p, func() uint64 { return xxh3.Hash(form) })
	}
}

// modelInForm finds where a multipart form in memory names a model.
func modelInForm(contentType string, form []byte, name string) (at rawjson.Span) {
	_, params, _ := mime.ParseMediaType(contentType)
	if params["boundary"] == "" {
		return at
	}
	delimiter := []byte("\r\n--" + params["boundary"])
	value := append([]byte("\r\n\r\n"+name), delimiter...)
	for i := 0; ; i++ {
		n := bytes.Index(form[i:], value)
		if n < 0 {
			return at
		}
		i += n
		head := form[max(0, bytes.LastIndex(form[:i], delimiter)):i]
		if bytes.Contains(head, []byte(`name="model"`)) || bytes.Contains(head, []byte("name=model")) {
			at.Start = i + len("\r\n\r\n")
			at.End = at.Start + len(name)
			return at
		}
	}
}
