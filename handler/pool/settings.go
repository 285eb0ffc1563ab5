package pool

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Settings are what one handler configures of its pool, or all handlers that name it. Zero
// values were not set. The tags name the options that handlers must agree on.
type Settings struct {
	Memory         int64                     `option:"index memory"`
	BlockSize      int                       `option:"index block_size"`
	BlockSizeUnset bool                      // the operator did not set BlockSize
	TextBlock      int                       `option:"index text_block"`
	TTL            time.Duration             `option:"affinity ttl"`
	MaxSessions    int                       `option:"affinity max_sessions"`
	Persist        time.Duration             `option:"affinity persist"`        // between snapshots; 0: none
	Router         string                    `option:"affinity persist router"` // names the snapshots' owner
	Engine         string                    `option:"engine"`                  // of workers that configure none
	MaxWaiting     int                       `option:"queue max_waiting"`
	MaxWait        time.Duration             `option:"queue max_wait"`
	Retries        RetryBudget               `option:"retry_budget"`
	Workers        map[string]WorkerSettings // by dial address, as far as configured
	Upstreams      map[string]bool           // static ones, by dial address
	Others         bool                      // placeholders or a dynamic source may give other workers
}

// RetryBudget bounds the retries. It may be unset.
type RetryBudget struct {
	Set     bool
	Percent float64 // of requests
	Rate    float64 // a second
}

// String implements fmt.Stringer.
func (b RetryBudget) String() string { return fmt.Sprintf("%g%% %g/s", b.Percent, b.Rate) }

var defaultRetryBudget = RetryBudget{Set: true, Percent: 20, Rate: 10}

const (
	defaultTextBlock   = 64
	defaultTTL         = 5 * time.Minute
	defaultMaxSessions = 1_000_000
	minPersist         = time.Second
	// DefaultPersist is the time between two snapshots.
	DefaultPersist    = 30 * time.Second
	defaultMaxWaiting = 1024
	defaultMaxWait    = 30 * time.Second
	minIndexMemory    = 1 << 20
	minTextBlock      = 16
	maxTextBlock      = 4096
	maxBlockSize      = 4096
)

// Add adds the settings of one worker. dynamic says that the worker need not be a static
// upstream.
func (s *Settings) Add(w *WorkerSettings, dynamic bool) error {
	if w == nil || w.Dial == "" {
		return errors.New("worker: dial is missing")
	}
	if _, twice := s.Workers[w.Dial]; twice {
		return fmt.Errorf("worker %s: configured twice", w.Dial)
	}
	if err := w.check(); err != nil {
		return fmt.Errorf("worker %s: %w", w.Dial, err)
	}
	if w.Dial != AllWorkers && !s.Upstreams[w.Dial] && !dynamic {
		return fmt.Errorf("worker %s: must be one of the upstreams", w.Dial)
	}
	s.Workers[w.Dial] = *w
	return nil
}

// Check returns what is wrong with the settings, except with those of workers.
func (s *Settings) Check() error {
	switch full := s.WithDefaults(); {
	case full.Memory < minIndexMemory:
		return fmt.Errorf("index memory: must be at least %d bytes, got %d", minIndexMemory, s.Memory)
	case full.BlockSize < 1 || full.BlockSize > maxBlockSize:
		return fmt.Errorf("index block_size: must be between 1 and %d tokens, got %d", maxBlockSize, s.BlockSize)
	case full.TextBlock < minTextBlock || full.TextBlock > maxTextBlock:
		return fmt.Errorf("index text_block: must be between %d and %d bytes, got %d", minTextBlock, maxTextBlock, s.TextBlock)
	case full.TTL < time.Second:
		return fmt.Errorf("affinity ttl: must be at least 1s, got %s", s.TTL)
	case full.MaxSessions < 1:
		return fmt.Errorf("affinity max_sessions: must be at least 1, got %d", s.MaxSessions)
	case s.Persist != 0 && s.Persist < minPersist:
		return fmt.Errorf("affinity persist interval: must be at least %s, got %s", minPersist, s.Persist)
	case full.MaxWaiting < 0:
		return fmt.Errorf("queue max_waiting: must be at least 1, got %d", s.MaxWaiting)
	case full.MaxWait < 0:
		return fmt.Errorf("queue max_wait: must be positive, got %s", s.MaxWait)
	case !(full.Retries.Percent >= 0 && full.Retries.Percent <= 1000):
		return fmt.Errorf("retry_budget: the percentage must be between 0 and 1000, got %g", s.Retries.Percent)
	case !(full.Retries.Rate >= 0 && full.Retries.Rate <= 1e6):
		return fmt.Errorf("retry_budget: the rate must be between 0 and 1000000 a second, got %g", s.Retries.Rate)
	case !knownEngine(s.Engine):
		return fmt.Errorf("engine: %w, got %q", errEngine, s.Engine)
	}
	return nil
}

// CheckIDs returns an error if two workers have one id.
func (s *Settings) CheckIDs() error {
	byID := make(map[uint64]string)
	known := maps.Clone(s.Upstreams)
	for dial := range s.Workers {
		known[dial] = true
	}
	delete(known, AllWorkers)
	for _, dial := range slices.Sorted(maps.Keys(known)) {
		id := s.Worker(dial).ID
		if other, taken := byID[id]; taken {
			return fmt.Errorf("worker %s: id: must be unique, got %d, which worker %s also has", dial, id, other)
		}
		byID[id] = dial
	}
	return nil
}

// WithDefaults returns the settings with defaults for what was not set.
func (s *Settings) WithDefaults() *Settings {
	full := *s
	full.BlockSizeUnset = s.BlockSizeUnset || s.BlockSize == 0
	full.Memory = cmp.Or(s.Memory, kvscore.DefaultMemory)
	full.BlockSize = cmp.Or(s.BlockSize, kvscore.DefaultBlockSize)
	full.TextBlock = cmp.Or(s.TextBlock, defaultTextBlock)
	full.TTL = cmp.Or(s.TTL, defaultTTL)
	full.MaxSessions = cmp.Or(s.MaxSessions, defaultMaxSessions)
	full.MaxWaiting = cmp.Or(s.MaxWaiting, defaultMaxWaiting)
	full.MaxWait = cmp.Or(s.MaxWait, defaultMaxWait)
	full.Retries = cmp.Or(s.Retries, defaultRetryBudget)
	all := s.Workers[AllWorkers]
	all.Engine = cmp.Or(all.Engine, s.Engine, EngineAuto)
	full.Workers = map[string]WorkerSettings{AllWorkers: all}
	for dial, w := range s.Workers {
		if dial != AllWorkers {
			full.Workers[dial], _ = w.merge(all)
		}
	}
	return &full
}

// Worker returns the settings of the worker at an address, including its id. s has its
// defaults. DPSize and KVTokens are 0 if the operator did not set them.
func (s *Settings) Worker(dial string) WorkerSettings {
	w, configured := s.Workers[dial]
	if !configured {
		w = s.Workers[AllWorkers]
	}
	w.Dial = dial
	if w.ID == 0 {
		w.ID = DerivedID(dial)
	}
	return w
}

// merge returns what two handlers of one pool configure together. The error names the
// options that they set to different values.
func (s *Settings) merge(o *Settings) (*Settings, error) {
	m := *s
	m.Workers, m.Upstreams, m.Others = maps.Clone(s.Workers), maps.Clone(s.Upstreams), s.Others || o.Others
	maps.Copy(m.Upstreams, o.Upstreams)
	err := mergeOptions(&m, *o, "option", "")
	for dial, theirs := range o.Workers {
		w, contradiction := s.Workers[dial].merge(theirs)
		m.Workers[dial], err = w, errors.Join(err, contradiction)
	}
	if err == nil {
		err = m.CheckIDs()
	}
	return &m, err
}

// mergeOptions fills in the fields of a struct that are not set with those of another. It
// skips fields without the tag, which names an option. The error names the options that
// both set to different values.
func mergeOptions(to, from any, tag, prefix string) error {
	var err error
	a, b := reflect.ValueOf(to).Elem(), reflect.ValueOf(from)
	for i := range a.NumField() {
		option, _, _ := strings.Cut(a.Type().Field(i).Tag.Get(tag), ",")
		switch own, other := a.Field(i), b.Field(i); {
		case option == "" || isUnset(other) || reflect.DeepEqual(own.Interface(), other.Interface()):
		case isUnset(own):
			own.Set(other)
		case option == "api_key": // a secret
			err = errors.Join(err, fmt.Errorf("%sapi_key: must be the same in all handlers", prefix))
		default:
			err = errors.Join(err, fmt.Errorf("%s%s: must be the same in all handlers, got %v and %v", prefix, option, reflect.Indirect(own), reflect.Indirect(other)))
		}
	}
	return err
}

func isUnset(v reflect.Value) bool { return v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0 }

// SharedSettings are the settings of all handlers of one configuration that name one
// pool. They grow while the configuration is provisioned.
type SharedSettings struct {
	mu      sync.Mutex
	All     *Settings
	unnamed map[string]bool // upstreams of the handlers that name no pool
	warned  bool            // of the queue without a limit
}

// Get returns the settings, with defaults.
func (s *SharedSettings) Get() *Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.All.WithDefaults()
}

func (s *SharedSettings) add(one *Settings) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.All.merge(one)
	if err == nil {
		s.All = all
	}
	return err
}

// Hashing returns how prompts are divided into blocks.
func (p *Pool) Hashing() api.Options {
	set := p.Settings.Load()
	return api.Options{TextBlock: set.TextBlock, BlockSize: set.BlockSize, Sizes: p.Scheduler.BlockSizes(), Seed: p.seed}
}
