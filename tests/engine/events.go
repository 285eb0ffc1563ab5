package engine

import (
	"fmt"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
)

// EventConfig is how an engine publishes KV events. The zero value of each field is its
// default. All sockets are on the loopback.
type EventConfig struct {
	// Form is how batches are written. Its dialect follows from the flavour. An SGLang has signed
	// hashes.
	Form publisher.Form
	// NoReplay leaves out the ROUTER sockets that answer with past batches. Default: they
	// are there.
	NoReplay bool
	// OldReplay has replays lack the frame of the topic, as in a vLLM before 0.26. Those of an SGLang
	// always lack it.
	OldReplay bool
	// Topic is the first frame of each message. Default: empty.
	Topic string
	// Buffer is how many batches replays go back. Default: 10000.
	Buffer int
	// HashSeed, if it is not 0, has the engine name blocks as no engine with another
	// seed does. Default: equal content has equal names in all engines.
	HashSeed uint64
	// HostBlocks is the size of an SGLang's second tier, in blocks. Default: no such tier.
	HostBlocks int
}

// complete fills in the defaults and checks the result.
func (c *EventConfig) complete(f Flavour) error {
	orDefault(&c.Buffer, 10000)
	switch f {
	case VLLM:
	case TRTLLM:
		c.Form.Dialect = publisher.TRTLLM
	case SGLang:
		c.Form.Dialect, c.Form.Hashes, c.OldReplay = publisher.SGLang, publisher.Signed, true
	case OldSGLang, LlamaCpp, Dynamo:
		return fmt.Errorf("%s publishes no KV events", f)
	}
	return nil
}

// publish starts a publisher for each rank; none if the engine has no events. Their addresses stay the
// same over Kill and Restart.
func (e *Engine) publish() (all []*publisher.Publisher, err error) {
	c, ranks := e.cfg.Events, e.cfg.Ranks
	if c == nil {
		return nil, nil
	}
	if e.sockets == nil {
		if e.sockets, err = canned.FreeAddrs(2 * ranks); err != nil {
			return nil, err
		}
	}
	for i := range ranks {
		p := publisher.Config{OldReplay: c.OldReplay, Topic: c.Topic, Buffer: c.Buffer, Form: c.Form}
		p.Listener, err = canned.ListenAgain(e.sockets[i])
		if err == nil && !c.NoReplay {
			p.Replay, err = canned.ListenAgain(e.sockets[ranks+i])
		}
		if err != nil {
			return all, fmt.Errorf("listening for subscribers of KV events: %w", err)
		}
		all = append(all, publisher.Start(p))
	}
	return all, nil
}
