package pool

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddyserver/caddy/v2"
)

// Settings are what one handler configures of its pool, or all handlers that name it. Zero
// values were not set. The tags name the options that handlers must agree on.
type Settings struct {
	Engine         string `json:"engine"` // of workers that configure none
	Index          `json:"index"`
	BlockSizeUnset bool // the operator did not set BlockSize
	Sessions       `json:"affinity"`
	Journal        Journal `json:"journal"`
	Share          Share   `json:"share"`
	Queue          `json:"queue"`
	Limits         Limits                     `json:"limits"`
	RetryBudget    *RetryBudget               `json:"retry_budget"`
	Workers        map[string]worker.Settings `json:"-"` // by dial address, as far as configured
	Upstreams      map[string]bool            `json:"-"` // static ones, by dial address
	Others         bool                       `json:"-"` // placeholders or a dynamic source may give other workers
	Backups        []string                   `json:"-"` // those of Workers with this role, once there are defaults
	Targets        map[string]bool            `json:"-"` // the classes with a ttft; true: they refuse or demote late requests
	refuses        bool                       // one of them does, once there are defaults
}

// Index configures the cache model. All handlers of a pool must agree on it.
type Index struct {
	// The most memory that the index uses, in bytes, at least 1 MiB. The index of KV events may use
	// as much again. Default: 512 MiB, or an eighth of the process's memory limit if that is less.
	Memory int64 `json:"memory,omitempty"`

	// The number of tokens in a block, from 1 to 4096. A multiple of the engines' own
	// block size fits best. Default: what the engines report, if they agree, in multiples
	// of at least 16; else 16.
	BlockSize int `json:"block_size,omitempty"`

	// The number of bytes in a block of prompt text, from 16 to 4096. The router compares
	// prompts by these blocks if it does not know their tokens. Default: 64.
	TextBlock int `json:"text_block,omitempty"`
}

// Sessions bounds the sessions that a pool remembers. All handlers of the pool must agree on it.
type Sessions struct {
	// How long the router remembers a session after its last turn, at least 1s.
	// Default: 5m.
	TTL caddy.Duration `json:"ttl,omitempty"`

	// The most sessions that the router remembers. It forgets the longest idle first.
	// Default: 1000000.
	MaxSessions int `json:"max_sessions,omitempty"`
}

// Journal keeps on disk what the router does. Its next run then knows the sessions, the cache
// models, and what it has learned of the engines. The files contain hashes and no text. All
// handlers of a pool must agree on it.
type Journal struct {
	// Whether there is a journal. Default: true.
	Enabled *bool `json:"enabled,omitempty"`

	// The file. There is another one beside it, with `.1` at the end of its name. Pools, and
	// Caddy processes, need files of their own. Global placeholders such as `{env.HOME}` are
	// allowed. Default: `kv_router/<pool>.journal` in Caddy's data directory.
	File string `json:"file,omitempty"`

	// The bytes of both files together, at least 1 MiB. What is oldest goes first; sessions
	// stay. Default: 64 MiB.
	MaxSize int64 `json:"max_size,omitempty"`
}

// Queue bounds the requests that wait, because all workers that can serve them are at
// `max_running` or because of `hold`. Package queue has their order. A request whose client
// disconnects leaves the queue. All handlers of a pool must agree on it.
type Queue struct {
	// The most requests that wait. If there are more, and none that `hold` keeps can go, the router
	// answers one with 429 (`queue_full`). Default: 1024.
	MaxWaiting int `json:"max_waiting,omitempty"`

	// How long a request waits, over all its attempts. If no worker can take it then, the router
	// answers it with 503 (`queue_timeout`). Requests of background classes wait on. Default: 30s.
	MaxWait caddy.Duration `json:"max_wait,omitempty"`

	// Whether requests also wait while all their workers are busy with prefills: `auto` or `off`. With
	// `auto`, a request goes to an engine when one of them can begin a prefill within about one step. What
	// waits stays in order. That begins with the second tenant or class, and when times are
	// learned; at once if a class refuses or demotes late requests. A request of another class whose time is
	// up, or for which the queue is too long, goes to an engine all the same. Default: `auto`.
	Hold string `json:"hold,omitempty"`

	// How late the first token of a request may be predicted to come from its workers. If it would
	// come later, the request goes to a worker with the role `backup`. Until then, a request that
	// `hold` keeps waits on. Default: none. A backup then serves what would wait, and nothing else.
	OverflowAfter caddy.Duration `json:"overflow_after,omitempty"`
}

// The values of Queue.Hold.
const (
	HoldAuto = "auto"
	HoldOff  = "off"
)

// RetryBudget bounds the retries of about the last ten seconds, so that they do not overload
// failing workers. It is the sum of a percentage of that time's requests and of a number a
// second. All handlers of a pool must agree on it. Three kinds of retries are free:
//
//   - after a failed connection
//   - those of net/http, after the worker closed an idle connection
//   - those of the operator's `retry_match`
type RetryBudget struct {
	// Retries as a percentage of requests, from 0 to 1000. Default: 0.
	Percent float64 `json:"percent"`

	// Further retries a second, from 0 to 1000000. Default: 0.
	PerSecond float64 `json:"per_second"`
}

func (b RetryBudget) String() string { return fmt.Sprintf("%g%% %g/s", b.Percent, b.PerSecond) }

const (
	minJournal     = 1 << 20
	minIndexMemory = 1 << 20
	minTextBlock   = 16
	maxTextBlock   = 4096
	maxBlockSize   = 4096
)

// Add adds the settings of one worker. dynamic says that the worker need not be a static
// upstream.
func (s *Settings) Add(w *worker.Settings, dynamic bool) error {
	if w == nil || w.Dial == "" {
		return errors.New("worker: dial is missing")
	}
	if _, twice := s.Workers[w.Dial]; twice {
		return fmt.Errorf("worker %s: configured twice", w.Dial)
	}
	if err := w.Check(); err != nil {
		return fmt.Errorf("worker %s: %w", w.Dial, err)
	}
	if w.Dial != worker.AllWorkers && !s.Upstreams[w.Dial] && !dynamic {
		return fmt.Errorf("worker %s: must be one of the upstreams: %s", w.Dial, strings.Join(slices.Sorted(maps.Keys(s.Upstreams)), ", "))
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
	case full.TTL < caddy.Duration(time.Second):
		return fmt.Errorf("affinity ttl: must be at least 1s, got %s", time.Duration(s.TTL))
	case full.MaxSessions < 1:
		return fmt.Errorf("affinity max_sessions: must be at least 1, got %d", s.MaxSessions)
	case full.Journal.MaxSize < minJournal:
		return fmt.Errorf("journal max_size: must be at least %d bytes, got %d", minJournal, s.Journal.MaxSize)
	case full.MaxWaiting < 0:
		return fmt.Errorf("queue max_waiting: must be at least 1, got %d", s.MaxWaiting)
	case full.MaxWait < 0:
		return fmt.Errorf("queue max_wait: must be positive, got %s", time.Duration(s.MaxWait))
	case full.OverflowAfter < 0:
		return fmt.Errorf("queue overflow_after: must be positive, got %s", time.Duration(s.OverflowAfter))
	case full.Hold != HoldAuto && full.Hold != HoldOff:
		return fmt.Errorf("queue hold: must be %s or %s, got %q", HoldAuto, HoldOff, s.Hold)
	case !(full.RetryBudget.Percent >= 0 && full.RetryBudget.Percent <= 1000):
		return fmt.Errorf("retry_budget: the percentage must be between 0 and 1000, got %g", s.RetryBudget.Percent)
	case !(full.RetryBudget.PerSecond >= 0 && full.RetryBudget.PerSecond <= 1e6):
		return fmt.Errorf("retry_budget: the rate must be between 0 and 1000000 a second, got %g", s.RetryBudget.PerSecond)
	case !worker.KnownEngine(s.Engine):
		return fmt.Errorf("engine: %w, got %q", worker.ErrEngine, s.Engine)
	}
	if err := s.Limits.check(); err != nil {
		return err
	}
	return s.Share.check()
}

// CheckIDs returns an error if two workers have one id.
func (s *Settings) CheckIDs() error {
	byID := make(map[uint64]string)
	known := maps.Clone(s.Upstreams)
	for dial := range s.Workers {
		known[dial] = true
	}
	delete(known, worker.AllWorkers)
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
	full.Memory = cmp.Or(s.Memory, max(minIndexMemory, min(kvscore.DefaultMemory, debug.SetMemoryLimit(-1)/8)))
	full.BlockSize = cmp.Or(s.BlockSize, kvscore.DefaultBlockSize)
	full.TextBlock = cmp.Or(s.TextBlock, 64)
	full.TTL = cmp.Or(s.TTL, caddy.Duration(5*time.Minute))
	full.MaxSessions = cmp.Or(s.MaxSessions, 1_000_000)
	full.Journal.MaxSize = cmp.Or(s.Journal.MaxSize, 64<<20)
	full.MaxWaiting = cmp.Or(s.MaxWaiting, 1024)
	full.MaxWait = cmp.Or(s.MaxWait, caddy.Duration(30*time.Second))
	full.Hold = cmp.Or(s.Hold, HoldAuto)
	full.RetryBudget = cmp.Or(s.RetryBudget, &RetryBudget{Percent: 20, PerSecond: 10})
	full.refuses = slices.Contains(slices.Collect(maps.Values(s.Targets)), true)
	all := s.Workers[worker.AllWorkers]
	all.Engine = cmp.Or(all.Engine, s.Engine, worker.EngineAuto)
	full.Workers, full.Backups = map[string]worker.Settings{worker.AllWorkers: all}, nil
	for dial, w := range s.Workers {
		switch {
		case w.IsBackup(): // what holds for engines does not hold for it
			full.Workers[dial] = w
			full.Backups = append(full.Backups, dial)
		case dial != worker.AllWorkers:
			full.Workers[dial], _ = mergeWorkers(w, all)
		}
	}
	return &full
}

// Worker returns the settings of the worker at an address, including its id. s has its
// defaults. DPSize and KVTokens are 0 if the operator did not set them.
func (s *Settings) Worker(dial string) worker.Settings {
	w, configured := s.Workers[dial]
	if !configured {
		w = s.Workers[worker.AllWorkers]
	}
	w.Dial = dial
	if w.ID == 0 {
		w.ID = worker.DerivedID(dial)
	}
	return w
}

// merge returns what two handlers of one pool configure together. The error names the
// options that they set to different values.
func (s *Settings) merge(o *Settings) (*Settings, error) {
	m := *s
	m.Workers, m.Upstreams, m.Others = maps.Clone(s.Workers), maps.Clone(s.Upstreams), s.Others || o.Others
	maps.Copy(m.Upstreams, o.Upstreams)
	m.Targets = maps.Clone(o.Targets)
	for class, refuses := range s.Targets {
		m.Targets[class] = m.Targets[class] || refuses
	}
	err := errors.Join(mergeOptions(&m, *o, ""), m.Limits.mergeClasses(o.Limits.Classes))
	for dial, theirs := range o.Workers {
		w, contradiction := mergeWorkers(s.Workers[dial], theirs)
		m.Workers[dial], err = w, errors.Join(err, contradiction)
	}
	if err == nil {
		err = m.CheckIDs()
	}
	return &m, err
}

// mergeOptions fills in the options of a struct that are not set with those of another, also
// within blocks. The JSON names of the fields name the options. The error names the options that both
// set to different values.
func mergeOptions(to, from any, prefix string) error {
	var err error
	a, b := reflect.ValueOf(to).Elem(), reflect.ValueOf(from)
	for i := range a.NumField() {
		option, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
		switch own, other := a.Field(i), b.Field(i); {
		case option == "" || option == "-":
		case own.Kind() == reflect.Struct:
			err = errors.Join(err, mergeOptions(own.Addr().Interface(), other.Interface(), prefix+option+" "))
		case isUnset(other) || reflect.DeepEqual(own.Interface(), other.Interface()):
		case isUnset(own):
			own.Set(other)
		case option == "api_key", option == "header", option == "password", option == "servers": // secrets
			err = errors.Join(err, fmt.Errorf("%s%s: must be the same in all handlers", prefix, option))
		default:
			err = errors.Join(err, fmt.Errorf("%s%s: must be the same in all handlers, got %v and %v", prefix, option, printable(own), printable(other)))
		}
	}
	return err
}

// mergeWorkers returns the settings of a worker with those of o in place of what was not set. The error
// names the options that both set to different values.
func mergeWorkers(w, o worker.Settings) (worker.Settings, error) {
	err := mergeOptions(&w, o, "worker "+o.Dial+" ")
	return w, err
}

// printable returns a value of an option for an error.
func printable(v reflect.Value) any {
	if d, ok := reflect.TypeAssert[caddy.Duration](v); ok {
		return time.Duration(d)
	}
	return reflect.Indirect(v)
}

func isUnset(v reflect.Value) bool { return v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0 }

func (s *Settings) schedulerSettings() kvscore.Settings {
	return kvscore.Settings{Memory: s.Memory, BlockSize: s.BlockSize, Bounded: s.refuses}
}

// SharedSettings are the settings of all handlers of one configuration that name one
// pool. They grow while the configuration is provisioned.
type SharedSettings struct{ all atomic.Pointer[Settings] }

// Get returns the settings, with defaults.
func (s *SharedSettings) Get() *Settings { return s.all.Load().WithDefaults() }

// agreement is what the handlers of one configuration agree on.
type agreement struct {
	agreeMu sync.Mutex
	config  *prometheus.Registry // identifies the configuration that was last provisioned
	agreed  *SharedSettings
}

// Agree adds the settings of one handler, and returns those of all handlers of its
// configuration. The metrics registry identifies the configuration.
func (a *agreement) Agree(config *prometheus.Registry, s *Settings) (*SharedSettings, error) {
	a.agreeMu.Lock()
	defer a.agreeMu.Unlock()
	if a.config != config || a.agreed == nil {
		a.config, a.agreed = config, new(SharedSettings)
		a.agreed.all.Store(s)
		return a.agreed, nil
	}
	all, err := a.agreed.all.Load().merge(s)
	if err != nil {
		return nil, fmt.Errorf("handlers that name it contradict each other: %w", err)
	}
	a.agreed.all.Store(all)
	return a.agreed, nil
}
