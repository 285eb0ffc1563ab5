package engine

import (
	"fmt"
	"net"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
)

// EventConfig is how an engine publishes KV events. The zero value of each field is its
// default. All sockets are on the loopback.
type EventConfig struct {
	// NoReplay leaves out the ROUTER sockets that answer with past batches. Default: they
	// are there.
	NoReplay bool
	// ReplayLayout is how replays are answered. Default: ReplayPlain for an SGLang,
	// ReplayTopic for others.
	ReplayLayout ReplayLayout
	// Topic is the first frame of each message. Default: empty.
	Topic string
	// Buffer is how many batches replays go back. Default: 10000.
	Buffer int
	// Encoding is how batches are laid out. Default: publisher.Arrays for OldSGLang,
	// publisher.Maps for others.
	Encoding publisher.Encoding
	// Hashes is how blocks are named. Default: publisher.Signed for an SGLang,
	// publisher.Unsigned for others.
	Hashes publisher.Hashes
	// HashSeed, if it is not 0, has the engine name blocks as no engine with another
	// seed does. Default: equal content has equal names in all engines.
	HashSeed uint64
	// HostBlocks is the size of an SGLang's second tier, in blocks. Default: no such tier.
	HostBlocks int
}

// ReplayLayout is which frames a replay's messages have.
type ReplayLayout string

// The layouts, without the empty frame in front.
const (
	// ReplayTopic is topic, number, payload: vLLM since 0.26, TensorRT-LLM.
	ReplayTopic ReplayLayout = "topic"
	// ReplayPlain is number, payload: SGLang, and vLLM before.
	ReplayPlain ReplayLayout = "plain"
)

func (f Flavour) sglang() bool { return f == SGLang || f == OldSGLang }

// complete fills in the defaults and checks the result.
func (c *EventConfig) complete(of *Config) error {
	if of.Flavour.sglang() {
		orDefault(&c.ReplayLayout, ReplayPlain)
		orDefault(&c.Hashes, publisher.Signed)
	}
	if of.Flavour == OldSGLang {
		orDefault(&c.Encoding, publisher.Arrays)
	}
	orDefault(&c.ReplayLayout, ReplayTopic)
	orDefault(&c.Hashes, publisher.Unsigned)
	orDefault(&c.Encoding, publisher.Maps)
	orDefault(&c.Buffer, 10000)
	switch {
	case of.Flavour != VLLM && of.Flavour != TRTLLM && !of.Flavour.sglang():
		return fmt.Errorf("%s publishes no KV events", of.Flavour)
	case c.HostBlocks > 0 && !of.Flavour.sglang():
		return fmt.Errorf("%s has no blocks in host memory", of.Flavour)
	}
	return nil
}

// form returns how a flavour's batches are written.
func (c *EventConfig) form(f Flavour) publisher.Form {
	out := publisher.Form{Encoding: c.Encoding, Hashes: c.Hashes}
	switch {
	case f.sglang():
		out.Dialect = publisher.SGLang
	case f == TRTLLM:
		out.Dialect = publisher.TRTLLM
	}
	return out
}

// sockets are the addresses of an engine's publishers, by rank. They stay the same over
// Kill and Restart.
type sockets struct {
	pub, replay []string
}

// publish starts a publisher for each rank; none if the engine has no events.
func (e *Engine) publish() (all []*publisher.Publisher, err error) {
	c := e.cfg.Events
	if c == nil {
		return nil, nil
	}
	var pubs, replays []net.Listener
	if pubs, err = listenRanks(&e.sockets.pub, e.cfg.Ranks); err != nil {
		return nil, err
	}
	if !c.NoReplay {
		if replays, err = listenRanks(&e.sockets.replay, e.cfg.Ranks); err != nil {
			closeAll(pubs)
			return nil, err
		}
	}
	for i := range e.cfg.Ranks {
		p := publisher.Config{
			Listener:  pubs[i],
			OldReplay: c.ReplayLayout == ReplayPlain, Topic: c.Topic, Buffer: c.Buffer,
			Form: c.form(e.cfg.Flavour),
		}
		if !c.NoReplay {
			p.Replay = replays[i]
		}
		all = append(all, publisher.Start(p))
	}
	return all, nil
}

// listenRanks listens on one port for each rank: those of addrs, or else a free range. It
// fills in addrs.
func listenRanks(addrs *[]string, n int) ([]net.Listener, error) {
	if len(*addrs) > 0 {
		return listenAt(*addrs, canned.ListenAgain)
	}
	plain := func(addr string) (net.Listener, error) { return net.Listen("tcp", addr) }
	var out []net.Listener
	var err error
	for range 100 {
		var ln net.Listener
		if ln, err = canned.Listen(); err != nil {
			return nil, err
		}
		start := ln.Addr().(*net.TCPAddr).Port
		ln.Close()
		*addrs = (*addrs)[:0]
		for i := range n {
			*addrs = append(*addrs, net.JoinHostPort("127.0.0.1", strconv.Itoa(start+i)))
		}
		if out, err = listenAt(*addrs, plain); err == nil {
			break
		}
	}
	if err != nil {
		*addrs = nil
		return nil, fmt.Errorf("listening for subscribers of KV events: %w", err)
	}
	return out, nil
}

func listenAt(addrs []string, listen func(string) (net.Listener, error)) ([]net.Listener, error) {
	var out []net.Listener
	for _, addr := range addrs {
		ln, err := listen(addr)
		if err != nil {
			closeAll(out)
			return nil, err
		}
		out = append(out, ln)
	}
	return out, nil
}

func closeAll(listeners []net.Listener) {
	for _, ln := range listeners {
		ln.Close()
	}
}
