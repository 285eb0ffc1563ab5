// Package kvrouter is a Caddy module that routes requests to LLM engines.
//
// The directive kv_router stands where reverse_proxy stood in front of a pool
// of vLLM, SGLang, TensorRT-LLM, llama.cpp or Dynamo servers, and sends each
// request to the engine that will answer it soonest: the one whose KV cache
// already holds the prompt's beginning, unless waiting there costs more than
// computing it again elsewhere. The proxying itself is Caddy's.
//
// Importing this package registers the module http.handlers.kv_router, its
// policies (http.handlers.kv_router.policies.*) and its Caddyfile directive.
// The documentation for operators is that of package handler.
package kvrouter

import (
	_ "github.com/caddy-kvrouter/kvrouter/handler"
)
