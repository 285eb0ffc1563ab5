package cache

// Media is an image or other media among a prompt's tokens. The tokens in its place are the
// same for all media.
type Media struct {
	Identifier     string
	Offset, Length int // in tokens
}

// BlockMedia is media as a block has it. Offset is from the block's first token, negative if
// the media begin earlier.
type BlockMedia struct {
	Identifier string
	Offset     int
}

// NewMediaPrompt is NewPrompt with media, in the order of their offsets. They are part of the
// keys as in vLLM: each block has those that overlap it, and where they begin.
func NewMediaPrompt(root Root, tokens []uint32, size int, media []Media) *Prompt {
	p := &Prompt{Root: root, Tokens: tokens, Keys: make([]Key, len(tokens)/size), size: size, media: media}
	parent, buf := root.Key(), make([]byte, 0, 4*size)
	for i := range p.Keys {
		p.Keys[i] = child(parent, tokens[i*size:(i+1)*size], p.mediaOf(i), buf)
		parent = p.Keys[i]
	}
	return p
}

// mediaOf returns the media of a block, which may be behind the prompt's last full block.
func (p *Prompt) mediaOf(block int) (list []BlockMedia) {
	from := block * p.size
	for _, m := range p.media {
		if m.Offset < from+p.size && m.Offset+m.Length > from {
			list = append(list, BlockMedia{m.Identifier, m.Offset - from})
		}
	}
	return list
}

// mediaOfRun returns the media of n blocks; nil if there are none.
func (p *Prompt) mediaOfRun(from, n int) (list [][]BlockMedia) {
	if len(p.media) == 0 {
		return nil
	}
	for i := range n {
		list = append(list, p.mediaOf(from+i))
	}
	return list
}
