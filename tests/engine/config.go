package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// StepModel says how long a step takes; see batch.StepModel.
type StepModel = batch.StepModel

// Config is an engine's configuration. The zero value of each field is its
// default; the defaults are about a model of 8 billion parameters on one H100.
type Config struct {
	// Name is what the engine says in EngineHeader. Default: engine.
	Name string
	// Addr is the host:port to listen on. Default: a free port of the loopback
	// below the range of ephemeral ports.
	Addr string
	// Model is the served model's name. Default: sim-8b.
	Model string
	// Flavour is the server that the engine looks like, and decides how a request
	// names the rank. Its inference is vLLM's, whatever it is; with Events, an SGLang has
	// a cache of its own kind. Default: VLLM.
	Flavour Flavour
	// Version is what the engine says it is. Default: one of its flavour.
	Version string
	// LoRAs are the names of adapters, which are served as models. Default: none.
	LoRAs []string
	// Ranks is the number of data-parallel ranks, each with its own cache and
	// batch. Default: 1.
	Ranks int
	// BlockSize is the tokens in a KV block. Default: 16.
	BlockSize int
	// Blocks is the KV blocks of each rank. Default: 16384.
	Blocks int
	// NoPrefixCache is --no-enable-prefix-caching of an engine without Events. Default: it caches.
	NoPrefixCache bool
	// MaxModelLen is the most tokens of prompt and answer together. Default:
	// 131072, or what Blocks hold if that is less.
	MaxModelLen int
	// TokenBudget is the most tokens that a step computes. Default: 4096.
	TokenBudget int
	// MaxRunning is the most requests that one rank runs at once. Default: 256,
	// or TokenBudget if that is less.
	MaxRunning int
	// AnswerTokens is the tokens of an answer, the end-of-sequence token
	// included, unless the request asks for another length. Default: 64.
	AnswerTokens int
	// ReasoningTokens is how many of an answer's tokens, from its beginning on,
	// are reasoning. Chats have them as reasoning_content, and later prompts
	// lack them. Default: 0.
	ReasoningTokens int
	// Words has text cut at the borders of words. A token then has as many bytes as
	// its kind of text makes it have: 2 to 6. Default: four bytes a token.
	Words bool
	// ScaleOut says that a vLLM renders requests for any client, as with
	// --enable-scale-out. Default: it refuses to.
	ScaleOut bool
	// Speed is how much faster than real time the engine runs: from more than 0
	// to 100. Default: 1.
	Speed float64
	// Step is the step times. Default: batch.DefaultStepModel.
	Step StepModel
	// KeepBodies lets the journal have the bodies, too. Default: digests only.
	KeepBodies bool
	// Priority is whether a vLLM takes requests with a priority. They are not
	// sooner for it. Default: no, it refuses them.
	Priority bool
	// StreamingSessions says that an SGLang opens streaming sessions, as with
	// --enable-streaming-session. Default: it refuses to.
	StreamingSessions bool
	// SessionsInChat says that chat and completions heed session_params, as in builds
	// of SGLang that forward them. Default: /generate alone does, as in SGLang itself.
	SessionsInChat bool
	// ServerInfo is what an SGLang tells beside the rest at /server_info. Default:
	// nothing.
	ServerInfo map[string]any
	// WakeTime is how long a vLLM takes to wake up, in real time. Default: none.
	WakeTime time.Duration
	// Events is how the engine publishes KV events. Default: it does not.
	Events *EventConfig
	// Transfer is how the engine hands KV to other engines. Default: it does not.
	Transfer *Transfer
}

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// complete fills in the defaults and checks the result.
func (c *Config) complete() error {
	orDefault(&c.Name, "engine")
	orDefault(&c.Model, "sim-8b")
	orDefault(&c.Flavour, VLLM)
	orDefault(&c.Ranks, 1)
	orDefault(&c.BlockSize, 16)
	orDefault(&c.Blocks, 16384)
	orDefault(&c.MaxModelLen, min(131072, c.Blocks*c.BlockSize))
	orDefault(&c.TokenBudget, 4096)
	orDefault(&c.MaxRunning, min(256, c.TokenBudget))
	orDefault(&c.AnswerTokens, 64)
	orDefault(&c.Speed, 1)
	orDefault(&c.Step, batch.DefaultStepModel)
	switch {
	case flavours[c.Flavour] == nil:
		return fmt.Errorf("unknown flavour %q", c.Flavour)
	case c.Speed < 0 || c.Speed > 100:
		return fmt.Errorf("speed %v is not between 0 and 100", c.Speed)
	case c.MaxModelLen > c.Blocks*c.BlockSize:
		return fmt.Errorf("%d blocks of %d do not hold a context of %d tokens", c.Blocks, c.BlockSize, c.MaxModelLen)
	case min(c.Ranks, c.BlockSize, c.TokenBudget, c.MaxRunning) < 1:
		return errors.New("a size below 1")
	}
	if c.Transfer != nil {
		transfer := *c.Transfer // it is the caller's
		c.Transfer = &transfer
		if err := transfer.complete(c.Flavour); err != nil {
			return err
		}
	}
	if c.Events == nil {
		return nil
	}
	events := *c.Events // it is the caller's
	c.Events = &events
	return c.Events.complete(c.Flavour)
}
