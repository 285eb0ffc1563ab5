// Package exact keeps what each engine's KV cache holds, block by block, as the engines'
// own events report it. It answers which leading part of a prompt each target holds, in
// which tier.
//
// It does not decode events, hash tokens, score or choose a target. The index of requests
// that the router has sent is package index.
//
// # Blocks and names
//
// A block is known by its place in a trie of content: a root, the content hashes of the
// blocks before it, and its own. Content hashes come from the caller, keyed with a secret,
// so that no client can choose collisions. An engine names blocks by hashes of its own.
//
// One table leads from names to places, for all targets:
//
//   - Engines with equal hash seeds give equal content equal names. The names lead to one
//     place.
//   - Engines with different seeds give one place several names. Each name leads to it.
//   - A target may store a block under a name that leads to another block, which only other
//     targets hold. Those may run a version of the engine that hashes less, or send false
//     events. The table then gets a key of this target's own instead of the name. Until
//     [Index.Clear], each later search for a name of this target tries such a key first.
//   - A name that leads to two blocks of one target is a contradiction. Either two names
//     collided, or the engine hashes less than the caller (SGLang leaves out the salt). The
//     first block keeps the name, and the index refuses the second.
//
// A target with such keys cannot name blocks that only others hold. The index refuses such
// names in an event without content, and as the parent if the event has no root.
//
// The events of one target therefore cost another target none of its blocks, with three
// exceptions:
//
//   - If one target removes a block from the shared tier, all targets lose it there.
//   - If events fill the memory, the index evicts chains of any target.
//   - A block that several targets hold may have several names. The index does not keep which
//     target uses which. Say target A calls block X 11, and target B calls it 12. If A then
//     stores block Y as 12, the index refuses Y, and A is incomplete.
//
// Names must therefore be hashes of content. If an engine counts its blocks instead, the
// caller must mix something of the target into the names.
//
// After a contradiction, the names of a target are ambiguous: the parent in an event may
// stand for another chain. From then on, the index accepts a block with a parent from this
// target only if the event has the root. [Index.Clear] ends this state.
//
// # Holes
//
// A target holds a block or does not. It may hold a block without the blocks before it.
// Such a block counts again as soon as the engine restores those.
//
// # Readers and writers
//
// One mutex serialises all changes. [Index.Match] takes no lock, writes no shared memory
// and may run at any time. It guarantees for each target and tier:
//
//   - The target held each block that counts, at some moment during the call.
//   - A block that the target held during the whole call is found.
//
// The blocks need not have been there at the same moment: a Match beside a writer may see
// some changes and miss earlier ones. After Clear has returned, no Match that begins later
// counts an old block, even if the number has a new owner.
//
// # Memory
//
// The index stays within a number of bytes, in which it counts all that it keeps. Over it,
// it evicts the ends of chains that no event has touched for long, and marks the targets
// that held them as incomplete. Garbage that Go has not collected yet is not counted.
//
// A block takes about 32 bytes, whatever the number of its holders. Each further name, or
// key of a target's own, takes about 28.
package exact
