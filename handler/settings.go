package handler

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// poolSettings are those of a handler's settings that belong to its pool, or
// those of all handlers that name it. Zero values were not set.
type poolSettings struct {
	memory      int64
	blockSize   int
	openBlocks  bool // the operator did not say blockSize; filled in with the defaults
	textBlock   int
	ttl         time.Duration
	maxSessions int
	engine      string // type of all workers, but for those that say theirs
	maxWaiting  int
	maxWait     time.Duration
	retries     retryBudget
	workers     map[string]Worker // by dial address, as far as configured
	upstreams   map[string]bool   // static ones, by dial address
	others      bool              // workers may be none of these
}

// retryBudget is a RetryBudget that may not be set.
type retryBudget struct {
	set     bool
	percent float64 // of requests
	rate    float64 // a second
}

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
	maxDPSize          = 1024
	engineAuto         = "auto"
	maxWorkerID        = 1<<53 - 1
	allWorkers         = "*"
)

// poolSettings returns the handler's settings of its pool.
func (h *Handler) poolSettings() (*poolSettings, error) {
	s := new(poolSettings)
	if ix := h.Index; ix != nil {
		s.memory, s.blockSize, s.textBlock = ix.Memory, ix.BlockSize, ix.TextBlock
	}
	if a := h.Affinity; a != nil {
		s.ttl, s.maxSessions = time.Duration(a.TTL), a.MaxSessions
	}
	if q := h.Queue; q != nil {
		s.maxWaiting, s.maxWait = q.MaxWaiting, time.Duration(q.MaxWait)
	}
	if b := h.RetryBudget; b != nil {
		s.retries = retryBudget{true, b.Percent, b.PerSecond}
	}
	s.engine = h.Engine
	switch full := s.withDefaults(); {
	case full.memory < minIndexMemory:
		return nil, fmt.Errorf("index memory: must be at least %d bytes, got %d", minIndexMemory, s.memory)
	case full.blockSize < 1 || full.blockSize > maxBlockSize:
		return nil, fmt.Errorf("index block_size: must be between 1 and %d tokens, got %d", maxBlockSize, s.blockSize)
	case full.textBlock < minTextBlock || full.textBlock > maxTextBlock:
		return nil, fmt.Errorf("index text_block: must be between %d and %d bytes, got %d", minTextBlock, maxTextBlock, s.textBlock)
	case full.ttl < time.Second:
		return nil, fmt.Errorf("affinity ttl: must be at least 1s, got %s", s.ttl)
	case full.maxWaiting < 0:
		return nil, fmt.Errorf("queue max_waiting: must be at least 1, got %d", s.maxWaiting)
	case full.maxWait < 0:
		return nil, fmt.Errorf("queue max_wait: must be positive, got %s", s.maxWait)
	case !(full.retries.percent >= 0 && full.retries.percent <= 1000):
		return nil, fmt.Errorf("retry_budget: the percentage must be between 0 and 1000, got %g", s.retries.percent)
	case !(full.retries.rate >= 0 && full.retries.rate <= 1e6):
		return nil, fmt.Errorf("retry_budget: the rate must be between 0 and 1000000 a second, got %g", s.retries.rate)
	case !knownEngine(s.engine):
		return nil, fmt.Errorf("engine: %w, got %q", errEngine, s.engine)
	case full.maxSessions < 1:
		return nil, fmt.Errorf("affinity max_sessions: must be at least 1, got %d", s.maxSessions)
	}
	if err := h.workerSettings(s); err != nil {
		return nil, err
	}
	return s, s.checkIDs()
}

// withDefaults returns the settings with the defaults in place of what was not
// set.
func (s *poolSettings) withDefaults() *poolSettings {
	full := *s
	full.openBlocks = s.openBlocks || s.blockSize == 0
	full.memory = orDefault(s.memory, kvscore.DefaultMemory)
	full.blockSize = orDefault(s.blockSize, kvscore.DefaultBlockSize)
	full.textBlock = orDefault(s.textBlock, defaultTextBlock)
	full.ttl = orDefault(s.ttl, defaultTTL)
	full.maxSessions = orDefault(s.maxSessions, defaultMaxSessions)
	full.maxWaiting = orDefault(s.maxWaiting, defaultMaxWaiting)
	full.maxWait = orDefault(s.maxWait, defaultMaxWait)
	full.retries = orDefault(s.retries, defaultRetryBudget)
	return &full
}

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// workerSettings checks the workers.
func (h *Handler) workerSettings(s *poolSettings) error {
	s.workers = make(map[string]Worker, len(h.Workers))
	s.upstreams = make(map[string]bool, len(h.ReverseProxy.Upstreams))
	s.others = h.ReverseProxy.DynamicUpstreamsRaw != nil
	for _, up := range h.ReverseProxy.Upstreams {
		s.upstreams[up.Dial] = true
		s.others = s.others || strings.Contains(up.Dial, "{")
	}
	for _, w := range h.Workers {
		if w == nil || w.Dial == "" {
			return fmt.Errorf("worker: the dial address is missing")
		}
		if _, twice := s.workers[w.Dial]; twice {
			return fmt.Errorf("worker %s: configured twice", w.Dial)
		}
		if w.KVTokens < 0 {
			return fmt.Errorf("worker %s: kv_tokens must not be negative, got %d", w.Dial, w.KVTokens)
		}
		if w.DPSize < 0 || w.DPSize > maxDPSize {
			return fmt.Errorf("worker %s: dp_size must be between 1 and %d, got %d", w.Dial, maxDPSize, w.DPSize)
		}
		if w.MaxRunning < 0 {
			return fmt.Errorf("worker %s: max_running must not be negative, got %d", w.Dial, w.MaxRunning)
		}
		if !knownEngine(w.Engine) {
			return fmt.Errorf("worker %s: engine: %w, got %q", w.Dial, errEngine, w.Engine)
		}
		if err := w.checkRole(); err != nil {
			return err
		}
		if err := w.checkEngine(); err != nil {
			return fmt.Errorf("worker %s: %w", w.Dial, err)
		}
		if w.ID > maxWorkerID {
			return fmt.Errorf("worker %s: id must be at most %d, for JSON's numbers are rounded above, got %d", w.Dial, uint64(maxWorkerID), w.ID)
		}
		if w.Dial == allWorkers && w.ID != 0 {
			return fmt.Errorf("worker *: id %d cannot be that of all workers", w.ID)
		}
		if w.Dial != allWorkers && !s.upstreams[w.Dial] && h.ReverseProxy.DynamicUpstreamsRaw == nil {
			return fmt.Errorf("worker %s: is not among the upstreams", w.Dial)
		}
		s.workers[w.Dial] = *w
	}
	return nil
}

var errEngine = fmt.Errorf("must be auto or one of %s", strings.Join(engine.Names, ", "))

func knownEngine(name string) bool {
	return name == "" || name == engineAuto || engine.Known(name)
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

// worker returns the settings of the worker with the address, with an id. Its
// DPSize and KVTokens are 0 if the operator has not said them.
func (s *poolSettings) worker(dial string) Worker {
	all := s.workers[allWorkers]
	w := s.workers[dial]
	w.Dial = dial
	w.Engine = orDefault(w.Engine, orDefault(all.Engine, orDefault(s.engine, engineAuto)))
	w.DPSize = orDefault(w.DPSize, all.DPSize)
	w.MaxRunning = orDefault(w.MaxRunning, all.MaxRunning)
	w.KVTokens = orDefault(w.KVTokens, all.KVTokens)
	w.APIKey = orDefault(w.APIKey, all.APIKey)
	w.Priority = orDefault(w.Priority, all.Priority)
	w.ThinkingBudget = orDefault(w.ThinkingBudget, all.ThinkingBudget)
	w.CacheSalt = orDefault(w.CacheSalt, all.CacheSalt)
	w.Drain = w.Drain || all.Drain
	if len(w.Models) == 0 {
		w.Models = all.Models
	}
	if len(w.Taints) == 0 {
		w.Taints = all.Taints
	}
	if w.ID == 0 {
		w.ID = derivedID(dial)
	}
	return w
}

// merge returns what two handlers of one pool want together. What one of them
// leaves open is the other's to say; the error names what both say differently.
func (s *poolSettings) merge(o *poolSettings) (*poolSettings, error) {
	m := &poolSettings{workers: maps.Clone(s.workers), upstreams: maps.Clone(s.upstreams), others: s.others || o.others}
	maps.Copy(m.upstreams, o.upstreams)
	err := errors.Join(
		mergeField(&m.memory, s.memory, o.memory, "index memory"),
		mergeField(&m.blockSize, s.blockSize, o.blockSize, "index block_size"),
		mergeField(&m.textBlock, s.textBlock, o.textBlock, "index text_block"),
		mergeField(&m.ttl, s.ttl, o.ttl, "affinity ttl"),
		mergeField(&m.maxSessions, s.maxSessions, o.maxSessions, "affinity max_sessions"),
		mergeField(&m.engine, s.engine, o.engine, "engine"),
		mergeField(&m.maxWaiting, s.maxWaiting, o.maxWaiting, "queue max_waiting"),
		mergeField(&m.maxWait, s.maxWait, o.maxWait, "queue max_wait"),
		mergeField(&m.retries, s.retries, o.retries, "retry_budget"),
	)
	for dial, theirs := range o.workers {
		ours := s.workers[dial]
		w := Worker{Dial: dial, Drain: ours.Drain || theirs.Drain}
		err = errors.Join(err,
			mergeField(&w.ID, ours.ID, theirs.ID, "worker "+dial+" id"),
			mergeField(&w.Engine, ours.Engine, theirs.Engine, "worker "+dial+" engine"),
			mergeField(&w.DPSize, ours.DPSize, theirs.DPSize, "worker "+dial+" dp_size"),
			mergeField(&w.MaxRunning, ours.MaxRunning, theirs.MaxRunning, "worker "+dial+" max_running"),
			mergeField(&w.KVTokens, ours.KVTokens, theirs.KVTokens, "worker "+dial+" kv_tokens"),
			mergeField(&w.Priority, ours.Priority, theirs.Priority, "worker "+dial+" priority"),
			mergeField(&w.ThinkingBudget, ours.ThinkingBudget, theirs.ThinkingBudget, "worker "+dial+" thinking_budget"),
			mergeField(&w.CacheSalt, ours.CacheSalt, theirs.CacheSalt, "worker "+dial+" cache_salt"),
			mergeField(&w.DynamoInstanceID, ours.DynamoInstanceID, theirs.DynamoInstanceID, "worker "+dial+" dynamo_instance_id"),
		)
		if mergeField(&w.APIKey, ours.APIKey, theirs.APIKey, "") != nil {
			err = errors.Join(err, fmt.Errorf("worker %s api_key: the handlers say different ones", dial))
		}
		if w.Models = ours.Models; len(w.Models) == 0 {
			w.Models = theirs.Models
		} else if len(theirs.Models) > 0 && !slices.Equal(ours.Models, theirs.Models) {
			err = errors.Join(err, fmt.Errorf("worker %s models: one handler says %v, another %v", dial, ours.Models, theirs.Models))
		}
		if w.Taints = ours.Taints; len(w.Taints) == 0 {
			w.Taints = theirs.Taints
		} else if len(theirs.Taints) > 0 && !slices.Equal(ours.Taints, theirs.Taints) {
			err = errors.Join(err, fmt.Errorf("worker %s taints: one handler says %v, another %v", dial, ours.Taints, theirs.Taints))
		}
		m.workers[dial] = w
	}
	if err == nil {
		err = m.checkIDs()
	}
	return m, err
}

func mergeField[T comparable](to *T, a, b T, name string) error {
	*to = orDefault(a, b)
	var zero T
	if a != b && a != zero && b != zero {
		return fmt.Errorf("%s: one handler says %v, another %v", name, a, b)
	}
	return nil
}

// sharedSettings are those of all handlers of one configuration that name one
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

// add adds those of one handler.
func (s *sharedSettings) add(one *poolSettings) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.all.merge(one)
	if err == nil {
		s.all = all
	}
	return err
}

// String implements fmt.Stringer.
func (b retryBudget) String() string { return fmt.Sprintf("%g%% %g/s", b.percent, b.rate) }

// roleBoth is the only value of Worker.Role.
const roleBoth = "both"

// checkRole checks the worker's role and taints.
func (w *Worker) checkRole() error {
	switch w.Role {
	case "", roleBoth:
	case "prefill", "decode":
		return fmt.Errorf("worker %s: role %s: prefill and decode cannot be split up between workers, the role must be %s", w.Dial, w.Role, roleBoth)
	default:
		return fmt.Errorf("worker %s: role: must be %s, got %q", w.Dial, roleBoth, w.Role)
	}
	if len(w.Taints) > nvext.MaxList {
		return fmt.Errorf("worker %s: taints: at most %d, got %d", w.Dial, nvext.MaxList, len(w.Taints))
	}
	for _, taint := range w.Taints {
		if taint == "" || len(taint) > nvext.MaxName {
			return fmt.Errorf("worker %s: taints: must have 1 to %d bytes, got %q", w.Dial, nvext.MaxName, taint)
		}
	}
	return nil
}

// hashing returns how the prompts of the pool's requests are cut into blocks.
func (p *pool) hashing() api.Options {
	set := p.settings.Load()
	return api.Options{TextBlock: set.textBlock, BlockSize: set.blockSize, Seed: p.seed}
}
