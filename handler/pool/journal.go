package pool

import (
	"context"
	"errors"
	"io/fs"
	"net/url"
	"path/filepath"
	"runtime"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

const (
	// openWithin is how long the journal waits for an earlier configuration to let go of the file.
	openWithin = 5 * time.Second
	// lastWithin bounds the last write: service managers kill a Caddy that takes long.
	lastWithin = 3 * time.Second
	// versionsApart is more than the versions that a store uses between a write and its end.
	versionsApart = affinity.Version(24 * time.Hour)
)

// JournalState returns how the pool's journal fares.
func (p *Pool) JournalState() JournalState {
	k := &p.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	s := JournalState{On: k.log != nil, Lost: k.outlet.Lost(), Restored: k.restored}
	if s.On {
		s.Status = k.log.Status()
	}
	return s
}

// JournalFile returns the default file of a pool's journal.
func JournalFile(pool string) string {
	return filepath.Join(caddy.AppDataDir(), "kv_router", url.PathEscape(pool)+".journal")
}

// Recall takes over the secret and the seeds of the journal in a file, because all that it holds
// is keyed by them. It does nothing to a pool that is in use. It writes nothing, because Caddy may
// reject the configuration.
func (p *Pool) Recall(path string) {
	k := &p.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	if p.servingSince.Load() != 0 || k.headPath != "" {
		return
	}
	k.headPath = path
	h, written, err := journal.ReadHead(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		p.Logger().Warn("the journal is ignored, and the pool begins anew", zap.String("file", path), zap.Error(err))
		return
	}
	p.setKeys(journal.Keys{Secret: h.Secret, Seed: h.Seed})
	p.Sessions.Skip(max(h.Version, affinity.Version(max(written.UnixNano(), 0))) + versionsApart) //nolint:gosec // positive
	k.recalled = h
}

// KeepJournal keeps the journal as the settings say, in their File. Without a File, it keeps none.
// The first call restores what Recall has found.
func (p *Pool) KeepJournal(set Journal) {
	k := &p.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	if set == k.set {
		return
	}
	k.set = set // first: another handler of the pool may ask for the same
	p.endJournal()
	k.outlet.Close()
	if k.outlet = nil; set.File == "" {
		return
	}
	k.outlet = k.journal.Open(false)
	var head *journal.Head
	if set.File == k.headPath {
		head, k.recalled = k.recalled, nil
	}
	if head != nil {
		over, all := make(chan struct{}), make(chan struct{})
		k.restoring.Store(&over)
		k.reading.Store(&all)
	}
	ctx, end := context.WithCancel(context.Background())
	k.end, k.ended = end, make(chan struct{})
	go p.keepJournal(ctx, set, head, k.outlet, k.ended)
}

// endJournal ends the log, with a last write. The lock of kept is held.
func (p *Pool) endJournal() {
	k := &p.kept
	if k.end == nil {
		return
	}
	k.end()
	k.mu.Unlock()
	select {
	case <-k.ended:
	case <-time.After(lastWithin): // the file system does not answer
	}
	k.mu.Lock()
	k.end, k.log = nil, nil
}

// keepJournal reads the log, and then writes it until the context ends.
func (p *Pool) keepJournal(ctx context.Context, set Journal, head *journal.Head, outlet *journal.Outlet, ended chan struct{}) {
	defer close(ended)
	k := &p.kept
	log, err := p.openJournal(ctx, set)
	if err == nil {
		defer log.Close()
		switch {
		case head != nil:
			p.restore(ctx, log, head)
		case p.wroteJournal(set.File):
			_, err = log.Read(ctx, func(*journal.Record) {})
		default:
			var stays string
			if stays, err = log.Reset(); stays != "" {
				p.Logger().Warn("the journal begins anew, because its keys are not those of the pool", zap.String("file_before", stays))
			}
		}
	}
	finish(&k.restoring)
	finish(&k.reading)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		outlet.Close()
		p.Logger().Warn("there is no journal: what this router knows ends with its process",
			zap.String("file", set.File), zap.Error(err))
		return
	}
	k.mu.Lock()
	k.log = log
	k.mu.Unlock()
	now := time.Now()
	p.Quota.States(now, 0, func(s *quota.State) { k.journal.AccountState(now, *s) })
	outlet.Keep(ctx, log, p.journalSource())
}

// journalSource returns what journals ask of the pool.
func (p *Pool) journalSource() *journal.Source {
	return &journal.Source{
		Head: func() *journal.Head {
			keys, set := p.keys.Load(), p.Settings.Load()
			return &journal.Head{
				Secret: keys.Secret, Seed: keys.Seed, Version: p.Sessions.Changes(), TextBlock: set.TextBlock, BlockSize: set.BlockSize,
			}
		},
		Dial: func(id uint64) string {
			if w := p.ByID(id); w != nil {
				return w.Dial
			}
			return ""
		},
		State: p.journalState, Bindings: p.writeBindings, Tenants: p.writeTenants,
		Failed: func(err error) {
			p.Raise(time.Now(), "the journal cannot be written", err)
		},
	}
}

// wroteJournal returns whether the pool has written the journal in a file, before a reload.
func (p *Pool) wroteJournal(file string) bool {
	h, _, err := journal.ReadHead(file)
	return err == nil && (journal.Keys{Secret: h.Secret, Seed: h.Seed}) == *p.keys.Load()
}

// openJournal opens the log. It waits while another configuration, which ends, has it.
func (p *Pool) openJournal(ctx context.Context, set Journal) (*journal.Log, error) {
	for begun := time.Now(); ; {
		log, err := journal.Open(set.File, set.MaxSize)
		if !errors.Is(err, journal.ErrTaken) || time.Since(begun) > openWithin || ctx.Err() != nil {
			return log, err
		}
		Sleep(ctx, 100*time.Millisecond)
	}
}

func (p *Pool) watchJournal(t time.Time) {
	n := p.JournalState().Lost
	if n > p.kept.lostReported {
		p.Raise(t, "records have no room in the journal")
	}
	p.kept.lostReported = n // less if the journal was opened anew
}

// journalState returns what was learned.
func (p *Pool) journalState() *journal.State {
	s := &journal.State{Learned: p.Scheduler.Learned(time.Now()), Ratios: p.Ratios.Learned()}
	for _, w := range p.All() {
		s.Workers = append(s.Workers, journal.Worker{
			Dial: w.Dial, ID: w.ID, BootID: w.Engine().Info.BootID, Seen: time.Unix(w.Seen(), 0),
		})
	}
	return s
}

// writeBindings writes the drains, the lists of models, the responses, and the bindings that live. used is as in
// [journal.Source].
func (p *Pool) writeBindings(e *journal.Encoder, at time.Time, used time.Duration) {
	for _, w := range p.All() {
		e.Worker(at, w.ID, w.Dial)
		if asked, v := w.DrainAsked(); v > 0 {
			e.Write(&journal.Record{Kind: journal.KindDrained, At: at, Target: w.Target(0), Body: &journal.Drain{Drains: asked, Version: v}}, nil)
		}
		if list := w.List(); list != nil {
			e.Write(&journal.Record{Kind: journal.KindModels, At: at, Target: w.Target(0), Body: new(keptModels(list))}, nil)
		}
	}
	p.Sessions.Dump(func(part []affinity.Saved) bool {
		for i := range part {
			if used == 0 || part[i].Idle <= used {
				e.Write(&journal.Record{Kind: journal.KindBound, At: at, Target: part[i].Target, Body: &part[i]}, nil)
			}
		}
		runtime.Gosched()
		return true
	})
	p.writeTenants(e, at, used)
	for _, one := range p.Responses.dump() {
		kept := &journal.Response{Hash: one.hash, Session: one.session}
		e.Write(&journal.Record{Kind: journal.KindResponse, At: at, Target: one.target, Body: kept}, nil)
	}
}

// writeTenants writes what tenants have used, of all or of those that changed in a time.
func (p *Pool) writeTenants(e *journal.Encoder, at time.Time, within time.Duration) {
	p.Quota.States(time.Now(), within, func(s *quota.State) {
		e.Write(&journal.Record{Kind: journal.KindTenant, At: at, Body: s}, nil)
	})
}
