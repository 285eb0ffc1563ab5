package engine

import (
	"slices"
	"strings"
)

// Names of requests to paths outside the clients' APIs that some engine handles
// specially.
const (
	// Invocations is SageMaker's request to a container: a request of any API that
	// the server has, mostly chat.
	Invocations = "invocations"
	// OpenSession and CloseSession open and close a session that SGLang holds.
	OpenSession  = "open_session"
	CloseSession = "close_session"
)

// PostTo returns the name of a request to a path outside the clients' APIs, empty
// for a request without a name.
func PostTo(path string) string {
	last := path[strings.LastIndexByte(path, '/')+1:]
	if slices.Contains([]string{Invocations, OpenSession, CloseSession}, last) {
		return last
	}
	return ""
}

// inferences are the ends of the paths outside the clients' APIs at which vLLM,
// SGLang, TensorRT-LLM, llama.cpp or Dynamo uses a model.
var inferences = []string{
	"/" + Invocations, "/vertex_generate", "/generate_from_file", "/generate", "/chat", "/encode", "/embed", "/embedding",
	"/completion", "/infill", "/reranking", "/generative_scoring", "/chat/completions/batch", "/completions/batch",
	"/audio/transcriptions", "/audio/translations", "/audio/speech", "/images/generations", "/images/edits", "/images/variations",
	"/videos", "/predict", "/judge",
}

// Infers returns whether some engine uses a model for a POST to a path outside
// the clients' APIs.
func Infers(path string) bool {
	path = strings.TrimRight(path, "/")
	return slices.ContainsFunc(inferences, func(end string) bool { return strings.HasSuffix(path, end) })
}
