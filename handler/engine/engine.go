// Package engine contains what differs between vLLM, SGLang, TensorRT-LLM,
// llama.cpp and Dynamo for a router. It reads what servers report about themselves
// ([Ask]) and puts a client's request into an engine's own members and headers
// ([Engine.Adapt]). It does no I/O: callers pass the servers' answers.
package engine

import (
	"slices"
	"strconv"
	"strings"
)

// Engine types, as configurations name them.
const (
	VLLM     = "vllm"
	SGLang   = "sglang"
	TRTLLM   = "trtllm"
	LlamaCpp = "llamacpp"
	Dynamo   = "dynamo"
	// Other is a server of none of these types.
	Other = "other"
)

// Names are all engine types.
var Names = []string{VLLM, SGLang, TRTLLM, LlamaCpp, Dynamo, Other}

// Known returns whether an engine type has that name.
func Known(name string) bool { return slices.Contains(Names, name) }

// Engine is what the router knows of one engine.
type Engine struct {
	// Type is one of Names: the operator's, or else the one that the engine shows.
	// It is empty if it is unknown.
	Type string
	// Info is what the engine reported, Settings what the operator set.
	Info     Info
	Settings Settings
}

// TakesRank returns whether the router can choose the engine's data-parallel rank
// for a request. Other engines choose it themselves.
func (e *Engine) TakesRank() bool {
	switch e.Type {
	case VLLM:
		return !before(e.Info.Version, 0, 11, 0) // it ignores the header
	case TRTLLM, LlamaCpp, Dynamo:
		return false
	}
	return true
}

// before returns whether a version is older than another one. It returns false for
// a version that it cannot read, such as that of a private build.
func before(version string, than ...int) bool {
	for _, want := range than {
		digits := len(version) - len(strings.TrimLeft(version, "0123456789"))
		n, err := strconv.Atoi(version[:digits])
		if err != nil {
			return false
		}
		if n != want {
			return n < want
		}
		version = strings.TrimPrefix(version[digits:], ".")
	}
	return false
}

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
	switch last := path[strings.LastIndexByte(path, '/')+1:]; last {
	case Invocations, OpenSession, CloseSession:
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
