package pool

import (
	"cmp"
	"context"
	"os"
	"reflect"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// ShareState returns how the sharing fares, and false if there is none.
func (p *Pool) ShareState() (s journal.ShareStatus, on bool) {
	if sharer := p.shared.sharer.Load(); sharer != nil {
		return sharer.Status(), true
	}
	return s, false
}

// Claims returns what is certain among the routers, and whether they share at all. It is nil if
// their server cannot be reached.
func (p *Pool) Claims() (c journal.Claims, shares bool) {
	if sharer := p.shared.sharer.Load(); sharer != nil {
		return sharer.Claims(), true
	}
	return nil, false
}

// KeepShare shares as the settings say. It does not wait for a server.
func (p *Pool) KeepShare(set Share) {
	k := &p.shared
	k.mu.Lock()
	defer k.mu.Unlock()
	if reflect.DeepEqual(set, k.set) {
		return
	}
	k.set = set
	if k.end != nil {
		k.end()
		select {
		case <-k.ended:
		case <-time.After(lastWithin):
		}
		k.end = nil
		k.sharer.Store(nil)
	}
	if len(set.Servers) == 0 {
		return
	}
	ctx, end := context.WithCancel(context.Background())
	s := p.newSharer(&set)
	k.end, k.ended = end, make(chan struct{})
	k.sharer.Store(s)
	go func(s *journal.Sharer, o *journal.Outlet, ended chan struct{}) {
		defer close(ended)
		defer o.Close()
		s.Run(ctx, o)
	}(s, p.kept.journal.Open(true), k.ended)
}

func (p *Pool) newSharer(set *Share) *journal.Sharer {
	name, _ := os.Hostname()
	prefix := cmp.Or(caddy.NewReplacer().ReplaceAll(set.Prefix, ""), "kv_router:")
	return &journal.Sharer{
		Name: name,
		Dial: func() (journal.Stream, error) {
			o, err := set.options(true)
			if err != nil {
				return nil, err
			}
			return journal.DialValkey(o, prefix, p.Name)
		},
		Keys: func() journal.Keys { return *p.keys.Load() }, Adopt: p.rekey, Source: p.journalSource(),
		Follower: &journal.Follower{
			Scheduler: p.Scheduler, Sessions: p.Sessions, Limits: &p.Quota, Other: p.follow,
			Worker: func(dial string) (id uint64, ok bool) {
				if w := p.Upstream(dial); w != nil {
					return w.ID, true
				}
				return 0, false
			},
			Pays: p.queue.paysElsewhere,
			Began: func(worker uint64) (over func()) {
				w := p.ByID(worker)
				if w == nil {
					return nil
				}
				w.RunElsewhere(1)
				return func() {
					w.RunElsewhere(-1)
					p.queue.freed(w)
				}
			},
		},
		Failed: func(err error) {
			p.Raise(time.Now(), "what other routers do is not known: the server of share fails", err)
		},
		Silent: func(one *journal.Peer) {
			p.Logger().Warn("another router is silent, and its requests do not count any more",
				zap.String("router", one.Name), zap.Int("requests", one.Requests))
		},
		Refused: func(one *journal.Peer) {
			p.Logger().Error("another router shares nothing with this one", zap.String("router", one.Name), zap.String("why", one.Refused))
		},
	}
}

// rekey replaces the keys of all hashes by those of the other routers. Sessions and cache models
// begin anew, unless the journal has brought the same keys.
func (p *Pool) rekey(k journal.Keys) {
	p.setKeys(k)
	p.Logger().Info("the keys of the other routers replace this one's: its sessions begin anew")
	p.kept.mu.Lock()
	set := p.kept.set
	p.kept.mu.Unlock()
	if set.File != "" {
		p.KeepJournal(Journal{})
		p.KeepJournal(set)
	}
}

func (p *Pool) follow(r *journal.Record, worker uint64) {
	w := p.ByID(worker)
	if s, learned := r.Body.(*journal.State); learned {
		p.restoreLearned(s, 0, p.Upstream)
	} else if w == nil {
		return
	}
	switch b := r.Body.(type) {
	case *journal.Response:
		p.Responses.follow(keptResponse{b.Hash, kvscore.Target{Worker: worker, Rank: r.Target.Rank}, b.Session})
	case *[]journal.Model:
		recallModels(w, *b)
	case *journal.Drain:
		if changed := w.FollowDrain(b.Drains, b.Version); changed {
			p.Logger().Info("another router's admin API began or ended the drain of a worker",
				zap.String("upstream", w.Dial), zap.Bool("drains", w.Draining()))
		}
	case *journal.Lost:
		for rank := range w.Ranks() {
			p.Scheduler.Clear(w.Target(rank))
		}
	}
}
