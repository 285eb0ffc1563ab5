// Package api knows what differs between the clients' APIs. It finds the prompt
// in a request body, and reads text, usage and end from an answer. Each API has
// one file, and one line in the list that [For] searches.
//
// The package reads three kinds of APIs ([Work]). Chat, completions, Responses,
// Messages and /generate have a prompt and an answer. Embeddings, scores and
// classes end with the prompt. The API count_tokens computes nothing. The APIs
// for conversations share one canonical text. A conversation that moves from
// one to another finds its blocks again.
//
// [Parse] scans a request body once, in place, and returns a [Request]. It has
// the model, limits, the prompt's chain of block hashes, and the place of
// nvext. An [Answer] reads the answer as it passes. It finds the first token,
// the usage, the end, and the chain of prompt and answer, with which the next
// turn will begin.
//
// The package does not validate requests: what it does not understand stays
// unknown, and never fails a request. It does not tokenize, choose workers, or
// decode and rewrite JSON. It writes errors ([ErrorBody], [BrokenEvent]), and
// asks for usage ([Request.AskUsage], [CutUsage]). It imports neither Caddy nor
// net/http.
package api
