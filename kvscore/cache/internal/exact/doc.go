// Package exact keeps what each engine's KV cache holds, block by block, as the engines'
// own events report it. It answers which leading part of a prompt each target holds, in
// which tier.
//
// It does not decode events, hash tokens, score or choose a target. The index of requests
// that the router has sent is package approx.
//
// # Blocks and names
//
// A block is known by its place in a trie of content: a root, the content hashes of the
// blocks before it, and its own. Content hashes come from the caller, keyed with a secret,
// so that no client can choose collisions. An engine names blocks by hashes of its own.
//
// One map leads from names to blocks, for all targets:
//
//   - Engines with equal hash seeds give equal content equal names. The names lead to one
//     block.
//   - Engines with different seeds give one block several names. Each name leads to it.
//   - A name that leads to a block which any target holds keeps leading there. The index refuses
//     an event that gives the name to another block: a contradiction. For example, the engine
//     hashes less than the caller (SGLang leaves out the salt), or sends false events.
//
// After a contradiction, the names of a target are ambiguous. From then on, the index accepts a
// block with a parent only if the event has the root, and the target itself holds the parent.
// It accepts an event without content only for blocks that the target holds.
// [Index.Clear] ends this state.
//
// The events of one target therefore cost another target none of its blocks, with two
// exceptions:
//
//   - If one target removes a block from the shared tier, all targets lose it there.
//   - If events fill the memory, the index evicts chains of any target.
//
// The target that comes second with a name is incomplete: the index knows less of it, and
// nothing false.
//
// Names must be hashes of content. If an engine counts its blocks instead, the
// caller must mix something of the target into the names.
//
// # Holes
//
// A target holds a block or does not. It may hold a block without the blocks before it.
// Such a block counts again as soon as the engine restores those.
//
// # Memory
//
// The index stays within a number of bytes, in which it counts all that it keeps. Over it,
// it evicts the ends of chains that no event has touched for long, and marks the targets
// that held them as incomplete. Garbage that Go has not collected yet is not counted.
//
// A block takes about 60 bytes, whatever the number of its holders. Each further name takes
// about 90.
package exact
