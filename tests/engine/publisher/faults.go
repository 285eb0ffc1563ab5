package publisher

import "time"

// faults are what is wrong with a publisher.
type faults struct {
	drop, lose int // batches
	delay      time.Duration
	mute       bool
}

// Drop keeps the next n batches from the subscribers. Replays have them.
func (p *Publisher) Drop(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults.drop = n
}

// Lose keeps the next n batches from the subscribers and from replays. Their sequence
// numbers are used up.
func (p *Publisher) Lose(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults.lose = n
}

// Delay has each later batch wait for so long before it gets its number. Batches wait
// one after another.
func (p *Publisher) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults.delay = d
	p.nudge()
}

// Mute says whether the publisher reads requests for replays and does not answer.
func (p *Publisher) Mute(mute bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults.mute = mute
}

// Forget keeps only the latest n batches for replays, as if the buffer had wrapped.
func (p *Publisher) Forget(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.past = p.past[max(0, len(p.past)-n):]
}

// Disconnect closes the connections of the PUB socket. New ones are welcome.
func (p *Publisher) Disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c, pub := range p.conns {
		if pub {
			c.Close()
		}
	}
}
