// Package kvscore knows for each target what its KV cache holds, how busy it is, and what
// a request would cost there. It chooses a target and books the request on it (a lease).
//
// It uses neither Caddy nor HTTP. The caller passes the time and the source of
// randomness, so a replay in virtual time runs the code that serves traffic.
package kvscore
