// Package kvrouter is a Caddy module that routes requests to LLM engines.
//
// The directive kv_router replaces reverse_proxy in front of a pool of vLLM,
// SGLang, TensorRT-LLM, llama.cpp or Dynamo servers. It sends each request to
// the engine that will answer it soonest. That is usually the engine whose KV
// cache already holds the beginning of the prompt, unless recomputing it
// elsewhere costs less than waiting there. The proxying itself is Caddy's.
//
// Importing this package registers the module http.handlers.kv_router, its
// policies (http.handlers.kv_router.policies.*) and its Caddyfile directive.
// The documentation for operators is that of package handler.
package kvrouter

import (
	_ "github.com/caddy-kvrouter/kvrouter/handler"
	_ "github.com/caddy-kvrouter/kvrouter/handler/endpointslices"
)
