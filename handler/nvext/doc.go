// Package nvext is the protocol between clients and the router. It covers the
// nvext member of a request body, the routing headers, and the nvext member of
// an answer. Names and forms are those of NVIDIA Dynamo's request extensions.
//
// The router reads a request's extensions in three steps. [Parse] reads the
// member of the body. [Ext.ApplyHeaders] replaces fields by what headers say.
// [Ext.Restrict] removes what the operator does not grant this client. [Cut]
// makes the same restriction in the bytes that go to a Dynamo, and removes what
// its generation refuses.
//
// An answer's nvext has the members that extra_fields asks for. The router makes
// them of [Workers], [Timing] and [IDs]. [Additions]
// puts them into the chunks of a stream, or into a plain answer.
// [AppendAnnotation] makes annotations, which are separate events.
//
// The package reads both generations of the protocol. Dynamo 1.0 to 1.2 has
// sessions in the body. Dynamo 1.3 and later has headers for them, and routing
// constraints. The sources are dynamo-llm's protocols/openai/nvext.rs (up to
// 1.2), protocols/common/extensions.rs (from 1.3 on), and for answers
// protocols/common/timing.rs and http/service/metrics.rs.
//
// A malformed nvext is an error, which the caller answers with a 400. A client
// that writes nvext must learn that the router did not understand it. The
// package does not find or remove the member in a body; package api does. It
// chooses no worker and knows no engine. It imports neither Caddy nor net/http.
package nvext
