package events

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
)

// maxHandshakes bounds the handshakes that a listening stream does at once.
const maxHandshakes = 8

// door accepts the connections of publishers that dial. The newest connection counts.
type door struct {
	s       *Stream
	ctx     context.Context // ends with the door
	end     context.CancelFunc
	work    sync.WaitGroup
	arrived chan struct{} // holds a token after a handshake
	slots   chan struct{}

	mu      sync.Mutex
	l       net.Listener
	failed  error  // of accepting; the listener is closed
	refused error  // of the last handshake that failed, which next has not noted
	waiting *inbox // the newest, which next has not returned yet
	current *inbox // what next has returned last
}

func newDoor(s *Stream) *door {
	d := &door{s: s, arrived: make(chan struct{}, 1), slots: make(chan struct{}, maxHandshakes)}
	d.ctx, d.end = context.WithCancel(context.Background())
	return d
}

// close stops listening, ends all connections that next has not returned, and waits.
func (d *door) close() {
	d.end()
	d.mu.Lock()
	if d.l != nil {
		_ = d.l.Close()
	}
	d.mu.Unlock()
	d.work.Wait()
	if d.waiting != nil {
		_ = d.waiting.stop()
	}
}

// next returns the newest connection as soon as there is one that it has not returned before.
func (d *door) next(ctx context.Context) (*inbox, error) {
	if err := d.listen(ctx); err != nil {
		return nil, err
	}
	stale := time.NewTicker(staleAfter)
	defer stale.Stop()
	for {
		d.mu.Lock()
		box, err, refused := d.waiting, d.failed, d.refused
		d.refused = nil
		if box != nil {
			d.current, d.waiting = box, nil
		} else if err != nil {
			d.l, d.failed = nil, nil
		}
		d.mu.Unlock()
		if box != nil || err != nil {
			return box, err
		}
		if refused != nil {
			d.s.degraded("a publisher failed to connect", refused)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-d.arrived:
		case <-d.s.resync:
			d.s.drop(asked)
		case <-stale.C:
			d.s.expire()
		}
	}
}

// listen binds the endpoint unless it is bound.
func (d *door) listen(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.l != nil {
		return nil
	}
	l, err := zmtp.Listen(ctx, d.s.cfg.Endpoint)
	if err != nil {
		return err
	}
	d.l = l
	d.work.Go(func() { d.accept(l) })
	return nil
}

func (d *door) accept(l net.Listener) {
	for {
		nc, err := l.Accept()
		if err != nil {
			_ = l.Close()
			d.mu.Lock()
			d.failed = err
			d.mu.Unlock()
			signal(d.arrived)
			return
		}
		select {
		case d.slots <- struct{}{}:
			d.work.Go(func() {
				d.welcome(nc)
				<-d.slots
			})
		default:
			_ = nc.Close()
		}
	}
}

// welcome shakes hands with a publisher. Its connection replaces an older one.
func (d *door) welcome(nc net.Conn) {
	c, err := d.s.subscribe(d.ctx, nc)
	if err != nil {
		d.mu.Lock()
		d.refused = err
		d.mu.Unlock()
		signal(d.arrived)
		return
	}
	box := newInbox(c, maxQueued)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Err() != nil {
		_ = box.stop()
		return
	}
	if d.waiting != nil {
		_ = d.waiting.stop()
	}
	if d.current != nil {
		d.current.abandon(errReplaced)
	}
	d.waiting = box
	signal(d.arrived)
}
