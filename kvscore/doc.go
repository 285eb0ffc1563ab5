// Package kvscore is about the targets: what each one holds in its KV cache,
// how busy it is, and what a request would cost there. It chooses a target
// and keeps the books about the choice (leases).
//
// It knows neither Caddy nor HTTP: time comes in as an argument, randomness
// through an injected source, so that a replay in virtual time runs the code
// that serves traffic.
package kvscore
