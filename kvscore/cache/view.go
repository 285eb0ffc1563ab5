package cache

import (
	"math"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/exact"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/textmap"
)

// Prompt is what the cache models must know of a request.
type Prompt struct {
	// Root identifies the model, LoRA, salt and kind of content. Only prompts with the same
	// root share blocks.
	Root uint64
	// Blocks are the content hashes of the prompt's full blocks in order.
	Blocks []uint64
	// Head is how Blocks begin.
	Head Head
	// Weights are the milli-tokens in a block.
	Weights Weights
	// BlockTokens is the number of tokens in one of Blocks, estimated for blocks of text.
	BlockTokens float64
	// Past is the length of the prompt after its last full block, in blocks.
	Past float32
	// Tokens is the length of the prompt, known or estimated. The rest are not in Blocks and
	// Past: MediaTokens of images and other media, OtherTokens of the other prompts of a batch.
	Tokens, MediaTokens, OtherTokens int64
	// MediaEnd is the number of blocks up to the end of the prompt's last image, rounded up; 0
	// if there is none. It can be len(Blocks) + 1.
	MediaEnd int
	// SkipsCache says that the engine computes the whole prompt even if it is cached, as
	// vLLM does for prompt_logprobs. The engine caches the result as usual.
	SkipsCache bool
	// Prefixes are beginnings of a prompt of text, from the shortest to the longest.
	Prefixes []Prefix
	// Identities are a prompt of token ids for targets with a [Feed], one for each size of
	// [Caches.BlockSizes]. Those of a prompt of text have no blocks.
	Identities []Identity
}

func (p *Prompt) chain() approx.Chain {
	return approx.Chain{Root: p.Root, Blocks: p.Blocks, Past: p.Past, Media: p.MediaTokens > 0, Weights: p.Weights}
}

// Head is the beginning of a prompt that templates may write in another order. Prompts share blocks of
// it only if all of it is equal, or if their tokens are known. Key is in the hashes of its Blocks, by XOR.
type Head struct {
	Key    uint64
	Blocks int
}

// out returns the blocks of a prompt without the key of its head, in memory if that has one.
func (h Head) out(blocks []uint64, memory *[]uint64) []uint64 {
	if h.Blocks == 0 {
		return blocks
	}
	*memory = append((*memory)[:0], blocks...)
	for i := range (*memory)[:min(h.Blocks, len(blocks))] {
		(*memory)[i] ^= h.Key
	}
	return *memory
}

// Findings is what the cache models say of a prompt, over all targets.
type Findings struct {
	// Tokens is the length of the prompt. Engines have counted the part that they have
	// computed; the rest is known or estimated. 0 if the prompt is unknown.
	Tokens int64
	// RequestBlocks are the complete KV blocks of the prompt, estimated for text.
	RequestBlocks float64
	// Known is the prefix of the prompt that some target holds.
	Known Known
	// SharedTokens is the length of the prefix that the prompt shares with several earlier
	// ones that continue differently, for example a system prompt. It is 0 if there is none.
	// SharedArrivals is the number of such prompts, SharedHolders the number of targets that
	// hold the prefix.
	SharedTokens                  float64
	SharedArrivals, SharedHolders int
}

// View is what the cache models said of one prompt at one time. Reuse it: its memory is kept.
type View struct {
	Findings

	blockTokens float64
	blockSize   int64
	skipsCache  bool
	sent        approx.Match
	computed    approx.Match
	late        bool           // computed is set
	text        []uint64       // memory for the blocks of a prompt without its head's key
	looks       [maxSizes]look // of identities
	n           int            // how many there are
}

// Known is a prefix of a prompt that some target holds: the first Blocks of its blocks, and
// the share Past of the next one.
type Known struct {
	Blocks  int
	Past    float64
	Tokens  float64
	Counted bool // an engine counted Tokens; otherwise they are estimated
}

// look is what the exact index says of one identity of a prompt.
type look struct {
	id     *Identity
	isText bool
	blocks [][]uint64 // token blocks: all, or those of the beginning of a text
	n      int        // how many they are
	known  int        // the text blocks of that beginning
	named  []uint64   // memory for a chain
	held   exact.Match
}

// Look matches a prompt in the cache models.
func (c *Caches) Look(now time.Time, p *Prompt, v *View) {
	v.n, v.late = 0, false
	if len(p.Identities) > 0 {
		c.lookUp(now, p, v)
	}
	chain := p.chain()
	c.mu.RLock()
	defer c.mu.RUnlock()
	c.sent.Match(&chain, &v.sent)
	if n := len(c.late); n > 0 && v.n > 0 {
		v.late = c.late[n-1].until.After(now)
	}
	if v.late {
		c.computed.Match(&chain, &v.computed)
	}
	v.describe(p, int64(c.blockSize))
}

// lookUp matches a prompt's identities in the exact index.
func (c *Caches) lookUp(now time.Time, p *Prompt, v *View) {
	isText := p.Weights.Kinds != nil
	text := p.Blocks
	if isText {
		c.learner.tell(now)
		text = p.Head.out(text, &v.text)
	}
	for i := range min(len(p.Identities), maxSizes) {
		id, l := &p.Identities[i], &v.looks[v.n]
		l.blocks, l.n, l.known = append(l.blocks[:0], id.Blocks), len(id.Blocks), len(p.Blocks)
		if isText {
			text := textmap.Text{Root: textRoot(p.Root, id.BlockTokens), Blocks: text, Weights: p.Weights, BlockTokens: id.BlockTokens}
			l.blocks, l.n, l.known = c.learner.texts.Find(&text, l.blocks[:0])
			l.extend(c, p, id)
		} else if l.n == 0 {
			continue
		}
		l.id, l.isText = id, isText
		c.exact.Match(id.Root, &l.held, l.blocks...)
		v.n++
	}
}

// Drop keeps no reference to the prompt.
func (v *View) Drop() {
	for i := range v.n {
		v.looks[i].id = nil
		clear(v.looks[i].blocks)
	}
	v.n = 0
}

func (v *View) describe(p *Prompt, blockSize int64) {
	m := &v.sent
	v.blockTokens, v.blockSize, v.skipsCache = p.BlockTokens, blockSize, p.SkipsCache
	v.Tokens, v.RequestBlocks = v.length(p)
	v.Known = Known{Blocks: m.Blocks, Past: m.Known - float64(m.Blocks), Tokens: float64(m.KnownTokens) / 1000, Counted: m.Counted}
	v.SharedTokens, v.SharedArrivals, v.SharedHolders = float64(m.SharedTokens)/1000, m.SharedArrivals, m.SharedHolders
}

// NewWeight returns the milli-tokens in each of the prompt's blocks behind the known prefix.
func (v *View) NewWeight(p *Prompt) int64 {
	blocks := float64(len(p.Blocks)) + float64(p.Past) - float64(v.Known.Blocks) - v.Known.Past
	tokens := float64(v.Tokens-p.MediaTokens-p.OtherTokens) - v.Known.Tokens
	if blocks < 1 || tokens < blocks/maxCount || tokens > blocks*p.BlockTokens*maxCount {
		return int64(1000 * p.BlockTokens)
	}
	return int64(1000 * tokens / blocks)
}

// priorTokens is the number of known tokens after which a conversation's own ratio weighs
// as much as that of its model.
const priorTokens = 256

// length returns the prompt's length in tokens and its complete KV blocks.
//
// An engine has counted the known prefix. The rest is estimated:
//
//	tokens = known tokens + ratio x estimate of the rest, by the kinds of its text
//	ratio  = (known tokens + prior) / (estimate of the known prefix + prior)
//
// Tokens of the known prefix above the estimate count as images.
func (v *View) length(p *Prompt) (tokens int64, blocks float64) {
	m, size, n := &v.sent, float64(v.blockSize)*1000, float64(len(p.Blocks))
	mean, past := p.BlockTokens*1000, float64(p.Past)
	full := n * mean
	if p.Weights.Kinds == nil || m.Blocks == 0 {
		return p.Tokens, full / size
	}
	var behind float64 // of the two parts, the shorter is summed
	if m.Blocks*2 < len(p.Blocks) {
		behind = full - float64(p.Weights.Sum(p.Blocks[:m.Blocks]))
	} else {
		behind = float64(p.Weights.Sum(p.Blocks[m.Blocks:]))
	}
	rest := max(0, behind+(past-(m.Known-float64(m.Blocks)))*mean)
	known, estimate := float64(m.KnownTokens), full+past*mean-rest
	media := float64(p.MediaTokens) * 1000
	seen := min(media, max(0, known-estimate))
	ratio := (known - seen + priorTokens*1000) / (estimate + priorTokens*1000)
	text := known - seen + rest*min(max(ratio, 0.25), 4)
	tokens = int64(math.Round((text+media)/1000)) + p.OtherTokens
	return max(tokens, 0), max(0, text+seen-past*mean) / size
}

// Overlap is the leading part of a prompt that a target holds, or is computing now. Blocks are
// KV blocks. For a prompt of text they are estimates and may be fractions.
type Overlap struct {
	OverlapBlocks float64 `json:"overlap_blocks"`
	// HeldBlocks is the same overlap in the prompt's own blocks.
	HeldBlocks int `json:"-"`
	// OverlapTokens are the tokens that the engine will report as cached: the overlap in full
	// blocks of the engine, without the prompt's last token. Engines always compute that one.
	OverlapTokens int64 `json:"overlap_tokens"`
	// HostTokens, DiskTokens and ExternalTokens are the part of OverlapTokens that the
	// engine must load from host memory, from disk or from external storage.
	HostTokens     int64 `json:"host_tokens,omitzero"`
	DiskTokens     int64 `json:"disk_tokens,omitzero"`
	ExternalTokens int64 `json:"external_tokens,omitzero"`
	// Knowledge is where the overlap comes from.
	Knowledge Knowledge `json:"knowledge"`
	// SharedBlocks are the leading blocks that an active request on the target also uses.
	SharedBlocks float64 `json:"shared_blocks"`
}

// Of returns the overlap with what a target holds.
func (v *View) Of(s *Slot) (o Overlap) {
	v.sentTo(s, &o)
	v.reported(s, &o)
	return o
}

// Any reports whether Of may be other than zero. It takes less time.
func (v *View) Any(s *Slot) bool {
	return s.feed.Load() != nil || s.number < len(v.sent.Held) && v.sent.Held[s.number] > 0
}

// sentTo sets the overlap with the router's own requests.
func (v *View) sentTo(s *Slot, o *Overlap) {
	m, number := &v.sent, s.number
	if number >= len(m.Held) || m.Held[number] == 0 {
		return
	}
	o.HeldBlocks = int(m.Held[number])
	blocks := float64(m.Tokens[number]) / float64(1000*v.blockSize)
	if n := m.InUse[number]; n > 0 {
		o.SharedBlocks = blocks * float64(n) / float64(o.HeldBlocks)
	}
	if v.skipsCache {
		return
	}
	o.OverlapBlocks = min(blocks, v.RequestBlocks)
	reused := max(0, min(m.Tokens[number]/1000, v.Tokens-1))
	o.OverlapTokens = reused - reused%s.Page()
}

// onItsWay returns how many of the prompt's blocks events may not name yet, which a target computes or
// has computed.
func (v *View) onItsWay(s *Slot, hitsInFlight bool) (n int) {
	if hitsInFlight && s.number < len(v.sent.InUse) {
		n = int(v.sent.InUse[s.number])
	}
	if v.late && s.number < len(v.computed.Held) {
		n = max(n, int(v.computed.Held[s.number]))
	}
	return n
}

// look returns what was looked up for a feed, nil if the feed says nothing of the prompt.
func (v *View) look(f *Feed) (*look, *FeedInfo) {
	if f == nil || v.n == 0 {
		return nil, nil
	}
	info := f.info.Load()
	if info.Knowledge == Approximate {
		return nil, nil
	}
	for i := range v.n {
		l := &v.looks[i]
		if l.id.BlockTokens != info.BlockTokens {
			continue
		}
		if l.id.Adapter && !info.Adapters || l.id.Salted && !info.Salts {
			break
		}
		return l, info
	}
	return nil, nil
}

// depth returns how many leading blocks a target holds in a tier or in a faster one.
func (l *look) depth(f *Feed, t Tier) int64 {
	if of := l.held.Depth[t]; f.number < len(of) {
		return int64(of[f.number])
	}
	return 0
}

// reported replaces the overlap by what the engine's events say.
func (v *View) reported(s *Slot, o *Overlap) {
	f := s.feed.Load()
	l, info := v.look(f)
	if l == nil {
		return
	}
	size := int64(info.BlockTokens)
	most := max(0, v.Tokens-1) / size // in blocks; engines compute the last token always
	device := min(most, l.depth(f, Device))
	held := min(most, max(device, l.depth(f, Shared)))
	knowledge := info.Knowledge
	known := int64(l.n)
	switch {
	case l.isText && (l.known == 0 || held >= known && o.HeldBlocks > l.known && o.OverlapTokens > known*size):
		return // what is behind may be on its way: the approximate model knows better
	case l.known > 0:
		soon := known * int64(min(v.onItsWay(s, info.HitsInFlight), l.known)) / int64(l.known)
		if !l.isText { // its length is known
			soon = min(soon, most)
		}
		device, held = max(device, soon), max(held, soon)
	}
	if l.isText && knowledge == Exact {
		knowledge = Learned
	}
	if info.Knowledge == Partial && o.OverlapTokens >= held*size {
		return // the deeper of both counts
	}
	o.Knowledge = knowledge
	if v.skipsCache {
		return
	}
	o.OverlapTokens = held * size
	o.OverlapBlocks = min(float64(o.OverlapTokens)/float64(v.blockSize), v.RequestBlocks)
	if v.blockTokens > 0 {
		o.HeldBlocks = int(float64(o.OverlapTokens) / v.blockTokens)
	}
	if held > device {
		host := min(most, max(device, l.depth(f, Host)))
		disk := min(most, max(host, l.depth(f, Disk)))
		o.HostTokens, o.DiskTokens, o.ExternalTokens = (host-device)*size, (disk-host)*size, (held-disk)*size
	}
}
