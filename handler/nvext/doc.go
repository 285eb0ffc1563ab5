// Package nvext is the protocol between clients and the router: the nvext
// member of a request body and the routing headers, which are NVIDIA Dynamo's
// names and forms for request extensions, and the nvext member of an answer.
//
// A request's extensions are read in three steps. [Parse] reads the member of
// the body; [Ext.ApplyHeaders] puts the headers over it, field by field;
// [Ext.Restrict] drops what the operator does not let this client say. What is
// left is to be honoured. [Edits] makes the same restriction in the bytes that
// go on to a Dynamo, and takes out what its generation refuses.
//
// An answer's nvext has the members that extra_fields asks for. They are made
// with [WorkerID.Append], [Timing.Append] and [AppendTokens], and put into the
// answer by [Additions], with an [AnswerFilter] if that is no stream. Annotations, which are events of their own, are made with
// [AppendAnnotation].
//
// Both generations of the protocol are read: that of Dynamo 1.0 to 1.2, which
// has sessions in the body, and that of 1.3 and later, which has headers for
// them and routing constraints. The sources are dynamo-llm's
// protocols/openai/nvext.rs (up to 1.2) and protocols/common/extensions.rs
// (from 1.3 on), and for answers protocols/common/timing.rs and
// http/service/metrics.rs.
//
// The package judges: an nvext that is not well-formed is an error, which the
// caller answers with a 400, because whoever writes one means the router and
// would otherwise not learn that it was not understood. It does not find the
// member in a body, nor cut it out; that is package api. It chooses no worker
// and knows no engine. It imports neither Caddy nor net/http.
package nvext
