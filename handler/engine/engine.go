// Package engine knows in what vLLM, SGLang, TensorRT-LLM, llama.cpp and Dynamo
// differ for a router: what they tell of themselves, and in what words they are
// told what a client asks for. It speaks to nobody: what the servers said is
// handed in.
package engine

import "slices"

// Engine types, as configurations name them.
const (
	VLLM     = "vllm"
	SGLang   = "sglang"
	TRTLLM   = "trtllm"
	LlamaCpp = "llamacpp"
	Dynamo   = "dynamo"
	// Other is a server that is none of these, or that nothing is known of.
	Other = "other"
)

// Names are all engine types.
var Names = []string{VLLM, SGLang, TRTLLM, LlamaCpp, Dynamo, Other}

// Known tells whether there is such an engine type.
func Known(name string) bool { return slices.Contains(Names, name) }

// TakesRank tells whether servers of a type are told which of their
// data-parallel ranks is to compute a request. Others choose it themselves.
func TakesRank(kind string) bool {
	switch kind {
	case TRTLLM, LlamaCpp, Dynamo:
		return false
	}
	return true
}
