package cache

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"sync"
)

// Prefix is a beginning of a text. Sum is a hash of it and of the model, without a key, so that all
// routers agree.
//
// Routers without a common server learn by engines which texts others have sent. The name that a router
// gives to a request has the prompt's prefixes, and the engine's events repeat the name.
type Prefix struct {
	Blocks int
	Sum    uint64
}

// NextPrefix returns how many blocks the shortest prefix has that is longer than some blocks. Each is
// longer than the one before by a quarter at most.
func NextPrefix(blocks int) int {
	const least, steps = 16, 3 // blocks, and bits
	if blocks < least {
		return least
	}
	step := bits.Len(uint(blocks)) - steps
	return (blocks>>step + 1) << step
}

// OwnSession begins the names that routers give to requests without a session. They name no session of
// a client.
const OwnSession = "kvr-"

// namedPrefixes is how many of the longest prefixes a session's name has.
const namedPrefixes = 8

// NewSession returns a name for a request without a session.
func NewSession(prefixes []Prefix) string {
	var buf [8 + 8*namedPrefixes]byte
	b := binary.LittleEndian.AppendUint64(buf[:0], rand.Uint64()) //nolint:gosec // the runtime seeds it
	for _, p := range prefixes[max(0, len(prefixes)-namedPrefixes):] {
		b = binary.LittleEndian.AppendUint64(b, p.Sum)
	}
	return OwnSession + base64.RawURLEncoding.EncodeToString(b)
}

// named has the last chain that any engine has stored for a text with some prefix, by the engine's name
// of its last block. It has a fixed size: new prefixes take the places of older ones.
type named struct {
	mu   sync.RWMutex
	list []namedPrefix // nil before the first
}

type namedPrefix struct{ sum, block uint64 }

// namedSize is the number of places in named. They take 2 MiB.
const namedSize = 1 << 17

// log records for which session an engine has stored the first n blocks of b. See [NewSession].
func (c *named) log(b *Stored, n int) {
	var sums [8 + 8*namedPrefixes]byte
	name, own := bytes.CutPrefix(b.Session, []byte(OwnSession))
	if !own || n == 0 || b.Blocks == nil || base64.RawURLEncoding.DecodedLen(len(name)) > len(sums) {
		return
	}
	end, _ := base64.RawURLEncoding.Decode(sums[:], name) //nolint:errcheck // what was decoded counts
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.list == nil {
		c.list = make([]namedPrefix, namedSize)
	}
	for at := 8; at+8 <= end; at += 8 {
		sum := binary.LittleEndian.Uint64(sums[at:]) ^ b.Root
		c.list[Mix(sum)%namedSize] = namedPrefix{sum, b.Names[n-1]}
	}
}

// block returns the last block of the chain of a prefix.
func (c *named) block(sum uint64) (name uint64, found bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.list == nil {
		return 0, false
	}
	e := c.list[Mix(sum)%namedSize]
	return e.block, e.sum == sum
}

// extend looks for the chain of a text of which another router has sent more than this one knows. The text
// and the chain may part anywhere behind the prefix. The chain counts up to the next one.
func (l *look) extend(c *Caches, p *Prompt, id *Identity) {
	for i := len(p.Prefixes) - 1; i >= 0 && p.Prefixes[i].Blocks > l.known; i-- {
		name, found := c.named.block(p.Prefixes[i].Sum ^ id.Root)
		if !found {
			continue
		}
		if _, l.named = c.exact.Chain(l.named, name); len(l.named) <= l.n {
			continue
		}
		// Where the text parts from what the map knows, the last blocks are a guess.
		if at := l.n - l.n/16 - 3; at >= 0 && l.named[at] != l.block(at) {
			continue // it does not begin as the text
		}
		known := min(NextPrefix(p.Prefixes[i].Blocks), len(p.Blocks))
		tokens := float64(p.Tokens-p.OtherTokens) * float64(known) / (float64(len(p.Blocks)) + float64(p.Past))
		if n := min(len(l.named), int(tokens)/id.BlockTokens); n > l.n {
			l.blocks, l.n, l.known = append(l.blocks[:0], l.named[:n]), n, known
		}
		return
	}
}

// block returns a token block by its position.
func (l *look) block(at int) uint64 {
	piece := 0
	for ; at >= len(l.blocks[piece]); piece++ {
		at -= len(l.blocks[piece])
	}
	return l.blocks[piece][at]
}
