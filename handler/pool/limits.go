package pool

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// Limits bound what each tenant uses of a pool. All handlers of the pool must agree on them. The
// router counts inference requests, and the tokens of their prompts and answers. It reserves an
// estimate when a request begins, and settles by what the engine reports. It answers a request above
// a limit with 429 (`rate_limit_exceeded`).
type Limits struct {
	// The limits of each tenant, such as `tokens 2M per 1m`, `tokens 500M per day`,
	// `requests 600 per 1m` or `concurrent 64`. The time is from 1s to 24h, or `day` or `month` in
	// UTC. Default: none.
	Default []quota.Limit `json:"default,omitempty"`

	// A file with the tenants that have a weight or limits of their own, in JSON:
	// `{"alice": {"weight": 2, "limits": ["tokens 20M per 1m"]}}`. The limits replace all of
	// `default`. The router reads the file again when it changes. Default: none.
	File string `json:"file,omitempty"`

	// What a prompt token counts that the engine had cached, from 0 to 1. Default: 1.
	CachedWeight *float64 `json:"cached_weight,omitempty"`

	// Classes are the limits of classes of requests, by name.
	Classes map[string][]quota.Limit `json:"-"`
}

// maxLimitsFile bounds the file, in bytes.
const maxLimitsFile = 64 << 20

func (l *Limits) check() error {
	if err := quota.CheckLimits(l.Default); err != nil {
		return fmt.Errorf("limit: %w", err)
	}
	for name, list := range l.Classes {
		if err := quota.CheckLimits(list); err != nil {
			return fmt.Errorf("class %s: limit: %w", name, err)
		}
	}
	if w := l.CachedWeight; w != nil && !(*w >= 0 && *w <= 1) {
		return fmt.Errorf("limit cached_weight: must be between 0 and 1, got %g", *w)
	}
	_, err := l.tenants()
	return err
}

func (l *Limits) mergeClasses(o map[string][]quota.Limit) (err error) {
	if len(o) == 0 {
		return nil
	}
	l.Classes = maps.Clone(l.Classes)
	if l.Classes == nil {
		l.Classes = make(map[string][]quota.Limit)
	}
	for name, limits := range o {
		if own := l.Classes[name]; own != nil && !slices.Equal(own, limits) {
			err = errors.Join(err, fmt.Errorf("class %s: limits: must be the same in all handlers, got %v and %v", name, own, limits))
		}
		l.Classes[name] = limits
	}
	return err
}

func (l *Limits) path() string { return caddy.NewReplacer().ReplaceAll(l.File, "") }

// tenants reads the file of tenants.
func (l *Limits) tenants() (of map[string]quota.Tenant, err error) {
	if l.File == "" {
		return nil, nil
	}
	info, err := os.Stat(l.path())
	if err == nil && info.Size() > maxLimitsFile {
		err = errors.New("it is too large")
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(l.path())
	}
	if err == nil {
		of, err = quota.ParseTenants(text)
	}
	if err != nil {
		err = fmt.Errorf("limit file %s: %w", l.path(), err)
	}
	return of, err
}

// version changes with the file of tenants. It is empty if that cannot be found.
func (l *Limits) version() string {
	info, err := os.Stat(l.path())
	if err != nil {
		return ""
	}
	return fmt.Sprint(info.ModTime().UnixNano(), info.Size())
}

// tenants are the limits as the operator has set them, and their file.
type tenants struct {
	workers *registry
	book    *quota.Book

	mu      sync.Mutex
	set     Limits
	version string // of the file that counts
}

// Keep has the pool limit its tenants. A file that cannot be read leaves things as they are.
func (l *tenants) Keep(set *Limits) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.set = *set
	l.read()
}

func (l *tenants) watch() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.set.File == "" {
		return
	}
	if v := l.set.version(); (v == "" || v != l.version) && l.read() {
		l.workers.Logger().Info("the limits of tenants have changed", zap.String("file", l.set.File))
	}
}

// read sets the limits. The caller holds the lock.
func (l *tenants) read() bool {
	l.version = l.set.version() // first: the file may change meanwhile
	of, err := l.set.tenants()
	if err != nil {
		l.workers.Raise(time.Now(), "the file of tenants cannot be read: its earlier limits hold", err)
		l.version = "" // raises it again
		return false
	}
	weight := 1.0
	if w := l.set.CachedWeight; w != nil {
		weight = *w
	}
	l.book.Set(&quota.Settings{Default: l.set.Default, Classes: l.set.Classes, Tenants: of, CachedWeight: weight})
	return true
}
