// Package engine knows in what vLLM, SGLang, TensorRT-LLM, llama.cpp and Dynamo
// differ for a router: what they tell of themselves, and in what words they are
// told what a client asks for. It speaks to nobody: what the servers said is
// handed in.
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
	// Other is a server that is none of these, or that nothing is known of.
	Other = "other"
)

// Names are all engine types.
var Names = []string{VLLM, SGLang, TRTLLM, LlamaCpp, Dynamo, Other}

// Known tells whether there is such an engine type.
func Known(name string) bool { return slices.Contains(Names, name) }

// TakesRank tells whether servers of a type and a version, empty where it is not
// known, are told which of their data-parallel ranks is to compute a request.
// Others choose it themselves.
func TakesRank(kind, version string) bool {
	switch kind {
	case VLLM:
		return !before(version, 0, 11, 0) // it ignores the header
	case TRTLLM, LlamaCpp, Dynamo:
		return false
	}
	return true
}

// before tells whether a version is older than another one. Where it cannot be
// read, as that of a build of one's own, it is not.
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
