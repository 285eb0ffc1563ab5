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
	method := x.r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	serve := flavours[x.engine.cfg.Flavour][method+" "+x.r.URL.Path]
	if serve == nil {
		x.fail404()
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
	inner := object{"message": e.message, "type": e.kind, "param": nil, "code": e.status}
	if e.param != "" {
		inner["param"] = e.param
	}
	x.json(e.status, object{"error": inner})
}

func (x *exchange) json(status int, v any) {
	out, _ := json.Marshal(v)
	x.header(status, "application/json")
	x.w.Write(out) //nolint:errcheck // the client may leave
}

func (x *exchange) value(v any) { x.json(http.StatusOK, v) }

// models lists the base model and its adapters.
func (x *exchange) models() {
	cfg := &x.engine.cfg
	describe := func(name string, parent any) object {
		return object{
			"id": name, "object": "model", "created": x.life.started.Unix(), "owned_by": owners[cfg.Flavour], "root": name, "parent": parent,
			"max_model_len": nil,
		}
	}
	base := describe(cfg.Model, nil)
	if cfg.Flavour == VLLM || cfg.Flavour == SGLang || cfg.Flavour == OldSGLang {
		base["max_model_len"] = cfg.MaxModelLen
	}
	list := append(make([]object, 0, 1+len(cfg.LoRAs)), base)
	for _, l := range cfg.LoRAs {
		list = append(list, describe(l, cfg.Model))
	}
	x.value(object{"object": "list", "data": list})
}
