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

// Engine is what is known of one engine.
type Engine struct {
	// Type is one of Names, as the operator says or else as the engine shows; empty
	// if it is not known.
	Type string
	// Info is what the engine answered, Settings what the operator says.
	Info     Info
	Settings Settings
}

// TakesRank tells whether the engine can be told which of its data-parallel ranks
// is to compute a request. Others choose it themselves.
func (e *Engine) TakesRank() bool {
	switch e.Type {
	case VLLM:
		return !before(e.Info.Version, 0, 11, 0) // it ignores the header
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
