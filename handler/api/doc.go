// Package api knows what differs between the clients' APIs: where in a
// request body the prompt is, and what an answer says about its text, its
// usage and its end. One file stands for each API, and For lists them.
//
// What an API is read for differs: chat, completions, Responses, Messages and
// /generate have a prompt and an answer, embeddings, scores and classes end
// with the prompt, count_tokens computes nothing ([Work]). The three APIs for
// conversations have one canonical text, so that a conversation that goes from
// one to another finds its blocks.
//
// A request body is scanned once, in place, and becomes a [Request]: model,
// limits, the prompt's identity as a chain of block hashes, and where the
// router's own member (nvext) can be cut out of the original bytes. An answer is
// shown to an [Answer] as it passes; that finds the first
// token, the usage, the end, and the chain that prompt and answer will have
// together when the client sends them back in its next turn.
//
// The package does not validate requests. It reads what it understands and
// leaves the rest unknown, so that nothing here can fail a request that an
// engine would have served. It is not for tokenizing, chooses nothing, and
// never decodes or rewrites JSON. What it writes is its own: errors
// ([ErrorBody], [BrokenEvent]), and the wish for usage that [Request.AskUsage]
// splices into a body and [UsageIn] finds in the answer. It
// imports neither Caddy nor net/http.
package api
