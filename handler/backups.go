package handler

import (
	"fmt"
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2"
)

// loadBackups loads the matchers of the handler's backups.
func (h *Handler) loadBackups(ctx caddy.Context) error {
	for _, w := range h.Workers {
		if !w.IsBackup() {
			continue
		}
		own := *w // other handlers may have the same
		sets, err := loadMatchers(ctx, &own, own.MatcherSetsRaw)
		if err != nil {
			return fmt.Errorf("worker %s: %w", w.Dial, err)
		}
		if h.backups == nil {
			h.backups = make(pool.Backups)
		}
		h.backups[w.Dial] = sets
	}
	return nil
}

// backupsOf returns the ids of the backups that may get a request: those that the handler itself declares,
// and whose matchers the request meets. A matcher that fails matches nothing.
func (h *Handler) backupsOf(r *http.Request) (ids []uint64) {
	set := h.pool.Settings.Load()
	for dial, sets := range h.backups {
		w := set.Worker(dial)
		if !w.IsBackup() {
			continue
		}
		if h.meets(r, sets, "a matcher of a backup fails, and matches nothing") {
			ids = append(ids, w.ID)
		}
	}
	slices.Sort(ids) // requests with equal needs wait together
	return ids
}
