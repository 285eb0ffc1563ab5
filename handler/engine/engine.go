// Package engine knows in what vLLM, SGLang, TensorRT-LLM, llama.cpp and Dynamo
// differ for a router. It speaks to nobody: what the servers said is handed in.
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

// RankStyle is how a server is told which of its data-parallel ranks is to
// compute a request.
type RankStyle int32

const (
	// RankHeader is the request header X-data-parallel-rank. Servers that do
	// not know it ignore it.
	RankHeader RankStyle = iota
	// RankBody is the member routed_dp_rank of the body's object. SGLang reads
	// the header, too, in newer versions, and prefers it.
	RankBody
	// RankNone is no way: the server chooses itself.
	RankNone
)

// RankStyleOf returns how a server of a type is told the rank.
func RankStyleOf(kind string) RankStyle {
	switch kind {
	case SGLang:
		return RankBody
	case TRTLLM, LlamaCpp, Dynamo:
		return RankNone
	}
	return RankHeader
}
