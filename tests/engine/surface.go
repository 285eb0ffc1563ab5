package engine

import (
	"encoding/json"
	"net/http"
)

// version is what the engine says it is.
const version = "0.32.0"

// oldVersion is that of an old SGLang.
const oldVersion = "0.4.9"

// surface answers what is not inference.
func (x *exchange) surface() {
	method := http.MethodGet
	serve := flavours[x.engine.cfg.Flavour][x.r.URL.Path]
	switch x.r.URL.Path {
	case "/ping":
		method = x.r.Method
	case SleepPath, WakePath, "/collective_rpc", OpenPath, ClosePath, ResetPath, FlushPath, AbortPath, "/tokenize", "/v1/tokenize", "/apply-template", "/v1/chat/completions/render", "/v1/completions/render":
		method = http.MethodPost
	}
	if serve == nil {
		x.fail404()
		return
	}
	if x.r.Method != method && (x.r.Method != http.MethodHead || method != http.MethodGet) {
		x.fail405()
		return
	}
	serve(x)
	if x.record.Outcome == Running { // only this goroutine changes it
		x.finish(Finished)
	}
}

func (x *exchange) fail404() { x.reject(&apiError{http.StatusNotFound, "Not Found", "Not Found", ""}) }

func (x *exchange) fail405() {
	x.reject(&apiError{http.StatusMethodNotAllowed, "Method Not Allowed", "Method Not Allowed", ""})
}

// reject answers with an error and notes the failure.
func (x *exchange) reject(e *apiError) {
	x.refuse(e)
	x.finish(Failed)
}

// refuse answers with an error in vLLM's shape.
func (x *exchange) refuse(e *apiError) {
	type inner struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    int     `json:"code"`
	}
	doc := struct {
		Error inner `json:"error"`
	}{inner{Message: e.message, Type: e.kind, Code: e.status}}
	if e.param != "" {
		doc.Error.Param = &e.param
	}
	out, _ := json.Marshal(doc)
	x.json(e.status, out)
}

func (x *exchange) json(status int, body []byte) {
	x.header(status, "application/json")
	x.w.Write(body) //nolint:errcheck // the client may leave
}

func (x *exchange) value(v any) {
	out, _ := json.Marshal(v)
	x.json(http.StatusOK, out)
}

type model struct {
	ID          string  `json:"id"`
	Object      string  `json:"object"`
	Created     int64   `json:"created"`
	OwnedBy     string  `json:"owned_by"`
	Root        string  `json:"root"`
	Parent      *string `json:"parent"`
	MaxModelLen *int    `json:"max_model_len"`
}

// models lists the base model and its adapters.
func (x *exchange) models() {
	cfg := &x.engine.cfg
	created := x.life.started.Unix()
	list := make([]model, 0, 1+len(cfg.LoRAs))
	owner := owners[cfg.Flavour]
	base := model{ID: cfg.Model, Object: "model", Created: created, OwnedBy: owner, Root: cfg.Model}
	if cfg.Flavour == VLLM || cfg.Flavour == SGLang || cfg.Flavour == OldSGLang {
		base.MaxModelLen = &cfg.MaxModelLen
	}
	list = append(list, base)
	for _, l := range cfg.LoRAs {
		list = append(list, model{ID: l, Object: "model", Created: created, OwnedBy: owner, Root: l, Parent: &cfg.Model})
	}
	x.value(map[string]any{"object": "list", "data": list})
}
