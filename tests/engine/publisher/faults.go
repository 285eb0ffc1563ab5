package publisher

import "time"

// faults are what is wrong with a publisher.
type faults struct {
	drop  int // batches
	delay time.Duration
}

// Drop keeps the next n batches from the subscribers. Replays have them.
func (p *Publisher) Drop(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults.drop = n
}

// Delay has each later batch wait for so long before it gets its number. Batches wait
// one after another.
func (p *Publisher) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults.delay = d
	p.nudge()
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
