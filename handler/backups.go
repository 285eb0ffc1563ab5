package handler

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
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
			h.backups, h.declared = make(map[string]caddyhttp.MatcherSets), make(map[string]bool)
		}
		h.backups[w.Dial], h.declared[w.Dial] = sets, true
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
		match, err := sets.AnyMatchWithError(r)
		if err != nil {
			h.pool.Incidents.Raise(time.Now(), "a matcher of a backup fails, and matches nothing", h.pool.Logger)
		} else if match {
			ids = append(ids, w.ID)
		}
	}
	slices.Sort(ids) // requests with equal needs wait together
	return ids
}
