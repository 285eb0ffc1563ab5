package pool

import "github.com/caddy-kvrouter/kvrouter/affinity"

// Holder is what a pool has for the sessions that engines hold. It lives as long as the pool.
type Holder interface {
	// Ended gets an engine-backed binding that has ended, other than by Unbind.
	Ended(key affinity.Key, held *affinity.Want, why affinity.Reason)
	// CloseAll closes all sessions that engines still hold, for the pool ends.
	CloseAll()
}

// Holder returns the pool's holder. The first call makes it. It must not point at anything that
// ends with a configuration.
func (p *Pool) Holder(make func() Holder) Holder {
	p.holderMu.Lock()
	defer p.holderMu.Unlock()
	if p.holder == nil && make != nil {
		p.holder = make()
	}
	return p.holder
}

// sessionEnded tells the holder of an end.
func (p *Pool) sessionEnded(key affinity.Key, held *affinity.Want, why affinity.Reason) {
	if h := p.Holder(nil); h != nil {
		h.Ended(key, held, why)
	}
}
