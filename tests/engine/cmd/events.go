package main

import (
	"flag"
	"net"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// events is the part of the command line about KV events. The ports are those of the
// first engine; the ranks of each further one have the next.
type events struct {
	cfg     engine.EventConfig
	on      bool
	private bool
}

func (o *events) flags(fs *flag.FlagSet) {
	c := &o.cfg
	fs.BoolVar(&o.on, "events", false, "publish KV events")
	fs.IntVar(&c.Port, "events-port", 0, "port of the first PUB socket (default free ones)")
	fs.StringVar(&c.Dial, "events-dial", "", "host:port that the first PUB socket connects to (default: they listen)")
	fs.BoolVar(&c.NoReplay, "events-no-replay", false, "do not answer with past batches")
	fs.IntVar(&c.ReplayPort, "events-replay-port", 0, "port of the first ROUTER socket (default free ones)")
	fs.StringVar((*string)(&c.ReplayLayout), "events-replay-layout", "", "frames of replays: topic or plain (default the flavour's)")
	fs.StringVar(&c.Topic, "events-topic", "", "topic of the messages")
	fs.IntVar(&c.Buffer, "events-buffer", 10000, "batches that replays go back")
	fs.Uint64Var(&c.First, "events-first", 0, "sequence number of the first batch")
	fs.StringVar((*string)(&c.Encoding), "events-encoding", "", "map, array or maps (default the flavour's)")
	fs.StringVar((*string)(&c.Hashes), "events-hashes", "", "u64, i64 or bytes (default the flavour's)")
	fs.BoolVar(&o.private, "events-private-hashes", false, "each engine names equal blocks otherwise")
	fs.IntVar(&c.HostBlocks, "host-blocks", 0, "blocks of an SGLang's second tier")
	fs.StringVar((*string)(&c.Sources), "events-sources", "", "answer to /kv_event_sources: ranks, list, wrapped or none (default ranks)")
}

// of returns the configuration of engine i of those with so many ranks; nil for none.
func (o *events) of(i, ranks int) (*engine.EventConfig, error) {
	if !o.on {
		return nil, nil //nolint:nilnil // nil is no events
	}
	c, shift := o.cfg, i*max(1, ranks)
	if c.Port > 0 {
		c.Port += shift
	}
	if c.ReplayPort > 0 {
		c.ReplayPort += shift
	}
	if c.Dial != "" {
		host, port, err := net.SplitHostPort(c.Dial)
		if err != nil {
			return nil, err
		}
		n, err := strconv.Atoi(port)
		if err != nil {
			return nil, err
		}
		c.Dial = net.JoinHostPort(host, strconv.Itoa(n+shift))
	}
	if o.private {
		c.HashSeed = uint64(i + 1)
	}
	return &c, nil
}
