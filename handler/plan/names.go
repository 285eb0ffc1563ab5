package plan

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const (
	// maxName is the longest name that is looked up, in bytes.
	maxName = 512
	// maxFields bounds the parts of a form that are read, and maxSegments those of a path.
	maxFields, maxSegments = 256, 16
)

const nameModel = "model"

// nameEngine records what names the engine of a request for no known API: its model, or the id of
// something that one engine keeps. The body comes first for the model, the path for the id.
func (rd *Reader) nameEngine(r *http.Request, p *Plan) {
	path, get := r.URL.Path, r.Method == http.MethodGet
	p.Lists = get && (path == "/models" || strings.HasSuffix(path, "/v1/models"))
	p.Models = rd.Public
	inForm := p.Model != "" && p.other == nil
	rd.nameInPath(p, path)
	if r.URL.RawQuery != "" {
		for name, values := range r.URL.Query() {
			rd.name(p, name, values[0])
		}
	}
	if p.Body != nil && p.Body.Size <= beginning && p.other != nil {
		rawjson.Texts(p.Body.Data, 3, func(name, text string) bool {
			if name != nameModel {
				rd.name(p, name, text)
			}
			return p.Response == ""
		})
	}
	if p.Model == "" {
		p.Model = rd.modelIn(path)
	}
	if _, id, ok := strings.Cut(path, "/models/"); ok && (get || r.Method == http.MethodHead) && p.Model == "" {
		p.Model = kept(id, maxKept)
	}
	if !inForm { // standInForm has done it
		rd.standFor(p, func() uint64 {
			if p.other == nil {
				return 0
			}
			return api.Opening(p.Body.Data)
		})
	}
}

// name records what a member of a body, a form or a query names.
func (rd *Reader) name(p *Plan, name, value string) {
	if name == nameModel && p.Model == "" {
		p.Model = kept(value, maxKept)
	}
	for _, id := range engine.Named(name, value) {
		rd.keeps(p, id)
	}
}

// keeps records that the request names something which an engine keeps, if that is an id of such.
func (rd *Reader) keeps(p *Plan, id string) {
	if p.Response == "" && id != "" && len(id) <= maxName && rd.Keeps(id) {
		p.Response = strings.Clone(id)
	}
}

// nameInPath records what the segments of a path name, the last one first. The first one is the API's.
func (rd *Reader) nameInPath(p *Plan, path string) {
	segments := strings.Split(path, "/")
	for i := len(segments) - 1; i > 1 && i > len(segments)-maxSegments; i-- {
		whole := segments[i]
		id, _, _ := strings.Cut(whole, ":") // such as batch_1:cancel
		for _, id := range []string{whole, id} {
			rd.keeps(p, id)
			if before := segments[i-1]; before == "voices" || before == "speakers" {
				rd.keeps(p, engine.Voice(id))
			}
		}
	}
}

// modelIn returns the longest part of a path, from its second segment on, that is the name of a
// model: its names may have slashes. It is empty if there is none.
func (rd *Reader) modelIn(path string) (model string) {
	model = rd.publicIn(path)
	cuts := make([]int, 0, maxSegments)
	for i := 1; i < len(path) && len(cuts) < maxSegments; i++ {
		if path[i] == '/' {
			cuts = append(cuts, i)
		}
	}
	for n, from := range cuts {
		for _, to := range append(slices.Clone(cuts[n+1:]), len(path)) {
			part := path[from+1 : to]
			if i := strings.LastIndexByte(part, ':'); i > len(model) && rd.Lists(part[:i]) { // such as m:predict
				model = part[:i]
			}
			if len(part) > len(model) && len(part) <= maxName && rd.Lists(part) {
				model = part
			}
		}
	}
	return strings.Clone(model)
}

// kept returns a name as the router keeps it: its own copy, or a digest if it has more than most bytes.
func kept(name string, most int) string {
	if len(name) > most {
		return "sha256:" + nvext.Digest([]byte(name))
	}
	return strings.Clone(name)
}

// readForm reads a form as far as the router needs it. If its beginning names a model that a worker
// serves, or the id of something that an engine keeps, that is enough. Otherwise the router reads all,
// if it may: to find the names, and to ask another engine if one lacks the model.
func (rd *Reader) readForm(r *http.Request, p *Plan, limit int64) (whole *body.Buffer, rest *body.Once, err error) {
	size := r.ContentLength
	whole, rest, err = rd.Memory.Read(r.Body, size, min(beginning, limit))
	switch {
	case err != nil:
		return nil, nil, err
	case whole != nil:
		rd.nameForm(r, p, whole.Data)
		return whole, nil, nil
	}
	rd.nameForm(r, p, rest.Begun())
	enough := p.Response != "" || p.Model != "" && rd.Lists(p.Model)
	if enough && rd.Public[p.Model] == nil || size > limit || !rd.Memory.HasRoom(size) {
		return nil, rest, nil
	}
	whole, rest, err = rd.Memory.Read(rest, size, limit)
	if whole != nil && p.Model == "" {
		rd.nameForm(r, p, whole.Data)
	}
	return whole, rest, err
}

// nameForm records what the fields of a form name, which may be cut. Behind its beginning, it
// searches for the model alone.
func (rd *Reader) nameForm(r *http.Request, p *Plan, form []byte) {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return
	}
	if kind != "multipart/form-data" {
		if len(form) > beginning {
			form = form[:max(0, bytes.LastIndexByte(form[:beginning], '&'))]
		}
		fields, _ := url.ParseQuery(string(form))
		for name, values := range fields {
			rd.name(p, name, values[0])
		}
		return
	}
	if params["boundary"] == "" {
		return
	}
	in := bytes.NewReader(form)
	parts := multipart.NewReader(in, params["boundary"])
	for range maxFields {
		part, err := parts.NextRawPart()
		if err != nil {
			return
		}
		if part.FileName() != "" {
			continue
		}
		value, err := io.ReadAll(io.LimitReader(part, maxName+1))
		if err == nil && len(value) <= maxName {
			rd.name(p, part.FormName(), string(value))
		}
		if p.Model != "" && len(form)-in.Len() > beginning {
			return
		}
	}
}
