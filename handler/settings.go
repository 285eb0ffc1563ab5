package handler

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// poolSettings are what one handler says of its pool, or all handlers that name it.
// Zero values were not set.
type poolSettings struct {
	memory      int64
	blockSize   int
	openBlocks  bool // the operator did not say blockSize; filled in with the defaults
	textBlock   int
	ttl         time.Duration
	maxSessions int
	engine      string // type of all workers that have no type of their own
	maxWaiting  int
	maxWait     time.Duration
	retries     retryBudget
	workers     map[string]workerSettings // by dial address, as far as configured
	upstreams   map[string]bool           // static ones, by dial address
	others      bool                      // workers may be none of these
}

// retryBudget bounds the retries. It may be unset.
type retryBudget struct {
	set     bool
	percent float64 // of requests
	rate    float64 // a second
}

// String implements fmt.Stringer.
func (b retryBudget) String() string { return fmt.Sprintf("%g%% %g/s", b.percent, b.rate) }

var defaultRetryBudget = retryBudget{set: true, percent: 20, rate: 10}

const (
	defaultTextBlock   = 64
	defaultTTL         = 5 * time.Minute
	defaultMaxSessions = 1_000_000
	defaultMaxWaiting  = 1024
	defaultMaxWait     = 30 * time.Second
	minIndexMemory     = 1 << 20
	minTextBlock       = 16
	maxTextBlock       = 4096
	maxBlockSize       = 4096
)

// add adds the settings of one worker. dynamic says that the worker need not be among
// the upstreams.
func (s *poolSettings) add(w *workerSettings, dynamic bool) error {
	if w == nil || w.Dial == "" {
		return errors.New("worker: the dial address is missing")
	}
	if _, twice := s.workers[w.Dial]; twice {
		return fmt.Errorf("worker %s: configured twice", w.Dial)
	}
	if err := w.check(); err != nil {
		return err
	}
	if w.Dial != allWorkers && !s.upstreams[w.Dial] && !dynamic {
		return fmt.Errorf("worker %s: is not among the upstreams", w.Dial)
	}
	s.workers[w.Dial] = *w
	return nil
}

// check returns what is wrong with the settings, but for those of workers.
func (s *poolSettings) check() error {
	switch full := s.withDefaults(); {
	case full.memory < minIndexMemory:
		return fmt.Errorf("index memory: must be at least %d bytes, got %d", minIndexMemory, s.memory)
	case full.blockSize < 1 || full.blockSize > maxBlockSize:
		return fmt.Errorf("index block_size: must be between 1 and %d tokens, got %d", maxBlockSize, s.blockSize)
	case full.textBlock < minTextBlock || full.textBlock > maxTextBlock:
		return fmt.Errorf("index text_block: must be between %d and %d bytes, got %d", minTextBlock, maxTextBlock, s.textBlock)
	case full.ttl < time.Second:
		return fmt.Errorf("affinity ttl: must be at least 1s, got %s", s.ttl)
	case full.maxSessions < 1:
		return fmt.Errorf("affinity max_sessions: must be at least 1, got %d", s.maxSessions)
	case full.maxWaiting < 0:
		return fmt.Errorf("queue max_waiting: must be at least 1, got %d", s.maxWaiting)
	case full.maxWait < 0:
		return fmt.Errorf("queue max_wait: must be positive, got %s", s.maxWait)
	case !(full.retries.percent >= 0 && full.retries.percent <= 1000):
		return fmt.Errorf("retry_budget: the percentage must be between 0 and 1000, got %g", s.retries.percent)
	case !(full.retries.rate >= 0 && full.retries.rate <= 1e6):
		return fmt.Errorf("retry_budget: the rate must be between 0 and 1000000 a second, got %g", s.retries.rate)
	case !knownEngine(s.engine):
		return fmt.Errorf("engine: %w, got %q", errEngine, s.engine)
	}
	return nil
}

// checkIDs checks that no two workers have one id.
func (s *poolSettings) checkIDs() error {
	byID := make(map[uint64]string)
	known := maps.Clone(s.upstreams)
	for dial := range s.workers {
		known[dial] = dial != allWorkers
	}
	for _, dial := range slices.Sorted(maps.Keys(known)) {
		if !known[dial] {
			continue
		}
		id := s.worker(dial).ID
		if other, taken := byID[id]; taken {
			return fmt.Errorf("worker %s: id %d is that of worker %s, too", dial, id, other)
		}
		byID[id] = dial
	}
	return nil
}

// withDefaults returns the settings with the defaults in place of what was not
// set.
func (s *poolSettings) withDefaults() *poolSettings {
	full := *s
	full.openBlocks = s.openBlocks || s.blockSize == 0
	full.memory = cmp.Or(s.memory, kvscore.DefaultMemory)
	full.blockSize = cmp.Or(s.blockSize, kvscore.DefaultBlockSize)
	full.textBlock = cmp.Or(s.textBlock, defaultTextBlock)
	full.ttl = cmp.Or(s.ttl, defaultTTL)
	full.maxSessions = cmp.Or(s.maxSessions, defaultMaxSessions)
	full.maxWaiting = cmp.Or(s.maxWaiting, defaultMaxWaiting)
	full.maxWait = cmp.Or(s.maxWait, defaultMaxWait)
	full.retries = cmp.Or(s.retries, defaultRetryBudget)
	all := s.workers[allWorkers]
	all.Engine = cmp.Or(all.Engine, s.engine, engineAuto)
	full.workers = map[string]workerSettings{allWorkers: all}
	for dial, w := range s.workers {
		if dial != allWorkers {
			full.workers[dial], _ = w.merge(all)
		}
	}
	return &full
}

// worker returns the settings of the worker with the address, with an id. s has its
// defaults. DPSize and KVTokens are 0 if the operator has not set them.
func (s *poolSettings) worker(dial string) workerSettings {
	w, configured := s.workers[dial]
	if !configured {
		w = s.workers[allWorkers]
	}
	w.Dial = dial
	if w.ID == 0 {
		w.ID = derivedID(dial)
	}
	return w
}

// merge returns what two handlers of one pool say together. Each may leave open what
// the other says. The error names what they set to different values.
func (s *poolSettings) merge(o *poolSettings) (*poolSettings, error) {
	m := &poolSettings{workers: maps.Clone(s.workers), upstreams: maps.Clone(s.upstreams), others: s.others || o.others}
	maps.Copy(m.upstreams, o.upstreams)
	err := errors.Join(
		mergeOption(&m.memory, s.memory, o.memory, "index memory"),
		mergeOption(&m.blockSize, s.blockSize, o.blockSize, "index block_size"),
		mergeOption(&m.textBlock, s.textBlock, o.textBlock, "index text_block"),
		mergeOption(&m.ttl, s.ttl, o.ttl, "affinity ttl"),
		mergeOption(&m.maxSessions, s.maxSessions, o.maxSessions, "affinity max_sessions"),
		mergeOption(&m.engine, s.engine, o.engine, "engine"),
		mergeOption(&m.maxWaiting, s.maxWaiting, o.maxWaiting, "queue max_waiting"),
		mergeOption(&m.maxWait, s.maxWait, o.maxWait, "queue max_wait"),
		mergeOption(&m.retries, s.retries, o.retries, "retry_budget"),
	)
	for dial, theirs := range o.workers {
		w, contradiction := s.workers[dial].merge(theirs)
		m.workers[dial], err = w, errors.Join(err, contradiction)
	}
	if err == nil {
		err = m.checkIDs()
	}
	return m, err
}

func mergeOption[T comparable](to *T, a, b T, name string) error {
	*to = cmp.Or(a, b)
	var unset T
	if a != b && a != unset && b != unset {
		return errContradiction(name, a, b)
	}
	return nil
}

func errContradiction(name string, a, b any) error {
	return fmt.Errorf("%s: one handler says %v, another %v", name, a, b)
}

// sharedSettings are the settings of all handlers of one configuration that name one
// pool. They grow while the configuration is provisioned.
type sharedSettings struct {
	mu  sync.Mutex
	all *poolSettings
}

// get returns the settings, with defaults.
func (s *sharedSettings) get() *poolSettings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.withDefaults()
}

// add adds the settings of one handler.
func (s *sharedSettings) add(one *poolSettings) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.all.merge(one)
	if err == nil {
		s.all = all
	}
	return err
}

// hashing returns how the prompts of the pool's requests are cut into blocks.
func (p *pool) hashing() api.Options {
	set := p.settings.Load()
	return api.Options{TextBlock: set.textBlock, BlockSize: set.blockSize, Seed: p.seed}
}
