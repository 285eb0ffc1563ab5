package engine

import "strings"

// The names of what is posted to paths that are no client's API, and that some
// engine is told more in than others.
const (
	// Invocations is what SageMaker asks of a container: a request of any API
	// that the server has, mostly chat.
	Invocations = "invocations"
	// OpenSession and CloseSession make and end a session that SGLang holds.
	OpenSession  = "open_session"
	CloseSession = "close_session"
)

// PostTo returns the name of what is posted to a path that belongs to no client's
// API, empty if there is nothing special about it.
func PostTo(path string) string {
	last := path[strings.LastIndexByte(path, '/')+1:]
	switch last {
	case Invocations, OpenSession, CloseSession:
		return last
	}
	return ""
}

// inferences are how the paths end, beside those of the clients' APIs, at which
// some engine computes something of a model: vLLM, SGLang, TensorRT-LLM,
// llama.cpp, Dynamo.
var inferences = []string{
	"/" + Invocations, "/vertex_generate", "/generate_from_file", "/generate", "/chat", "/encode", "/embed", "/embedding",
	"/completion", "/infill", "/reranking", "/generative_scoring", "/chat/completions/batch", "/completions/batch",
	"/audio/transcriptions", "/audio/translations", "/audio/speech", "/images/generations", "/images/edits", "/images/variations",
	"/videos", "/predict", "/judge",
}

// Infers tells whether some engine computes something of a model for what is
// posted to a path that belongs to no client's API.
func Infers(path string) bool {
	path = strings.TrimRight(path, "/")
	for _, end := range inferences {
		if strings.HasSuffix(path, end) {
			return true
		}
	}
	return false
}
