// Package engine is a simulated vLLM: an HTTP server that behaves as one does
// where it matters to a router. It has a real prefix cache (package cache) and
// real continuous batching (package batch), with a model of step times in place of
// a GPU. It has data-parallel ranks behind one address, vLLM's answers, errors and
// metrics, aborts on disconnect, and faults on demand. Its answers are words that
// follow from the prompt and a seed, so that two engines with one configuration
// give the same answer. It can look like an SGLang, a TensorRT-LLM, a llama.cpp or
// a Dynamo frontend (Flavour).
//
// It is not for tests of a protocol's details, for which package canned is
// enough. Its times are those of a formula, not of a machine.
//
// As an SGLang it also has /generate, and streaming sessions (StreamingSessions), after
// SGLang's python/sglang/srt/session:
//
//   - A session keeps the KV of its turns in blocks that nothing evicts. The client sends
//     only the new tokens of a turn. The usage counts those of all turns.
//   - Each rank opens and closes each session, and knows only its own turns.
//   - A session has one turn at a time. A close waits for its end. An aborted turn
//     leaves the context of the turns before it, but not their KV.
//   - The idle timeout counts from the begin of the latest turn, in real time. Sessions
//     are closed for it, or after a turn, once a second.
//   - SGLang reads session_params in chat and completions, and drops them there.
//     SessionsInChat makes them count.
//
// Sessions that are not streaming ones are refused. The journal has what became of each
// open, turn and close.
//
// As a vLLM it also has /inference/v1/generate, with token ids in and out. It ignores features.
//
// With Config.Events each rank publishes KV events as its flavour does (package publisher),
// and the engine says where. Cached tells what the cache really has.
//
//   - A vLLM publishes a batch when a step ends that changed its cache. A clear waits for
//     the next step. Each copy of a block has its own event, stored or removed.
//   - An SGLang has a radix tree, with one copy of each block. Requests find a block when
//     its prefill has ended, and events name it then. One removal has the blocks of a
//     chain that go together,
//     where a real one always evicts all that its tree has in one place. Names of blocks
//     leave out salt and adapter.
//   - A TensorRT-LLM tells neither tier nor salt.
//
// With Config.Transfer the engine hands the KV of prompts to other engines, and gets it from
// them, over a socket of its own:
//
//   - A vLLM takes kv_transfer_params as with NIXL. It keeps the blocks of a prefill phase until
//     a decode engine has fetched them, or their lease ends. A decode phase whose prefill engine
//     is gone answers 500 after 5 s; in a stream, with an error event. The usage of a decode
//     phase has the prefill phase's cached tokens. Turns in the other direction
//     (bidirectional_kv_xfer) are not simulated.
//   - The phases of an SGLang meet in a bootstrap_room, and each waits for the other one. If the
//     prefill phase ends without its KV, the decode phase waits on. If the prefill engine dies, it
//     answers 500 after 15 s. A second phase in a taken room gets 500, where a real one dies.
//     Engines with a role refuse requests without a room. /abort_request ends requests by
//     the beginning of their rid.
//   - A TensorRT-LLM takes disaggregated_params: context_only, then generation_only.
//
// The vLLM and SGLang parts follow captures of vLLM 0.32 and SGLang 0.5.23 on a CPU, that of
// TensorRT-LLM its documentation.
//
// What differs from vLLM:
//
//   - a request with n above 1 or more than one prompt is refused with 400;
//   - blocks are reserved for prompt and answer at admission, so no request is
//     preempted and vllm:kv_cache_usage_perc counts the reserved ones;
//   - blocks that were never filled are used first, those that a request has
//     given back included, which vLLM before 0.24 puts behind the cached ones;
//   - there is no null block, so that one block more than in vLLM can be used;
//   - the responses and messages APIs take and give messages of text only;
//   - stop strings, logprobs, sampling parameters, images and tool calls in
//     answers are accepted and ignored, or refused where vLLM would with a model
//     of text;
//   - all durations in metrics and journal are virtual: those of an engine at
//     Speed 1, however fast it runs.
package engine
