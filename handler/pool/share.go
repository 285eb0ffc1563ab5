package pool

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/valkey-io/valkey-go"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// Share has several routers in front of the same engines act as one. Each tells the others what it
// sends to which worker, in a stream of a Valkey or Redis server (6.2 or later). All handlers of a
// pool must agree on it. Values may be global placeholders such as `{env.VALKEY_PASSWORD}`.
type Share struct {
	// The server, such as `valkey://10.0.0.5:6379/0`: with the scheme `valkey`, `redis`, or for TLS
	// `valkeys`, `rediss`. Several are those of a cluster. With `?master_set=<name>` they are
	// sentinels. Default: none, and the router shares nothing.
	Servers []string `json:"servers,omitempty"`

	// The user. Default: that of the first server's address.
	Username string `json:"username,omitempty"`

	// The password. Default: that of the first server's address.
	Password string `json:"password,omitempty"`

	// What all keys in the server begin with. Default: `kv_router:`.
	Prefix string `json:"prefix,omitempty"`

	// A file with the certificates, in PEM, of authorities that the router trusts with the server.
	// Default: those of the system.
	CA string `json:"tls_ca,omitempty"`

	// Files with the router's certificate and its key, in PEM. Default: none.
	Cert string `json:"tls_cert,omitempty"`
	Key  string `json:"tls_key,omitempty"`
}

// check returns what is wrong with the option, without a look at files or at the server.
func (s *Share) check() error {
	if len(s.Servers) == 0 && !reflect.DeepEqual(*s, Share{}) {
		return errors.New("share: the address of a server is missing")
	}
	_, err := s.options(false)
	return err
}

// options returns the options of the client. Without files, certificates are missing.
func (s *Share) options(files bool) (o valkey.ClientOption, err error) {
	repl := caddy.NewReplacer()
	for i, server := range s.Servers {
		one, err := valkey.ParseURL(repl.ReplaceAll(server, ""))
		if _, ok := errors.AsType[*url.Error](err); ok { // its text has the address, or a part: maybe the password
			err = errors.New("it is no URL; escape special characters of a password, or use the option password")
		}
		if err != nil {
			return o, fmt.Errorf("share: server %d: must be like valkey://host:6379/0: %w", i+1, err)
		}
		if i == 0 {
			o = one
			continue
		}
		if (one.TLSConfig != nil) != (o.TLSConfig != nil) {
			return o, errors.New("share: all servers must have TLS, or none")
		}
		o.InitAddress = append(o.InitAddress, one.InitAddress...)
	}
	o.Username = cmp.Or(repl.ReplaceAll(s.Username, ""), o.Username)
	o.Password = cmp.Or(repl.ReplaceAll(s.Password, ""), o.Password)
	if o.Sentinel.MasterSet != "" {
		o.Sentinel.TLSConfig = o.TLSConfig
	}
	switch {
	case s.CA+s.Cert+s.Key == "":
	case o.TLSConfig == nil:
		return o, errors.New("share: tls_ca, tls_cert and tls_key need an address with valkeys:// or rediss://")
	case (s.Cert == "") != (s.Key == ""):
		return o, errors.New("share: tls_cert and tls_key go together")
	case files:
		err = s.certify(o.TLSConfig, repl)
	}
	return o, err
}

// certify reads the certificates.
func (s *Share) certify(t *tls.Config, repl *caddy.Replacer) error {
	if s.CA != "" {
		pem, err := os.ReadFile(repl.ReplaceAll(s.CA, ""))
		if err != nil {
			return fmt.Errorf("share: tls_ca: %w", err)
		}
		if t.RootCAs = x509.NewCertPool(); !t.RootCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("share: tls_ca: there is no certificate in %s", s.CA)
		}
	}
	if s.Cert != "" {
		own, err := tls.LoadX509KeyPair(repl.ReplaceAll(s.Cert, ""), repl.ReplaceAll(s.Key, ""))
		if err != nil {
			return fmt.Errorf("share: tls_cert: %w", err)
		}
		t.Certificates = []tls.Certificate{own}
	}
	return nil
}

const incidentShare = "what other routers do is not known: the server of share fails"

// shared is how a pool shares its records.
type shared struct {
	mu    sync.Mutex // of the fields up to sharer; KeepShare holds it for long
	set   Share
	end   context.CancelFunc
	ended chan struct{}

	sharer atomic.Pointer[journal.Sharer] // nil: it shares nothing
}

// ShareState returns how the sharing fares, and false if there is none.
func (p *Pool) ShareState() (s journal.ShareStatus, on bool) {
	if sharer := p.shared.sharer.Load(); sharer != nil {
		return sharer.Status(), true
	}
	return s, false
}

// Claims are what is certain among routers.
type Claims = journal.Claims

// Upstream returns the worker at an address, nil if it is no upstream.
func (p *Pool) Upstream(dial string) *Worker {
	w, _ := p.upstream(dial)
	return w
}

// Claims returns what is certain among the routers, and whether they share at all. It is nil if
// their server cannot be reached.
func (p *Pool) Claims() (c Claims, shares bool) {
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

// newSharer returns what shares the pool's records.
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
			Scheduler: p.Scheduler, Sessions: p.Sessions.Ristretto, Other: p.follow,
			Worker: func(dial string) (id uint64, ok bool) {
				if w := p.Upstream(dial); w != nil {
					return w.ID, true
				}
				return 0, false
			},
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
			p.Incidents.Raise(time.Now(), incidentShare, func() *zap.Logger { return p.Logger().With(zap.Error(err)) })
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

// follow takes a record of another router.
func (p *Pool) follow(r *journal.Record, worker uint64) {
	if r.Kind == journal.KindState {
		p.restoreLearned(&r.State, 0, p.Upstream)
		return
	}
	w := p.ByID(worker)
	if w == nil {
		return
	}
	switch r.Kind { //nolint:exhaustive // the others are applied already
	case journal.KindResponse:
		p.Responses.follow(keptResponse{r.Response.Hash, kvscore.Target{Worker: worker, Rank: r.Target.Rank}, r.Response.Session})
	case journal.KindLost:
		for rank := range w.Ranks() {
			p.Scheduler.Clear(w.Target(rank))
		}
	case journal.KindModels:
		recallModels(w, r.Models)
	case journal.KindDrained:
		if changed := w.FollowDrain(r.Drained, r.Version); changed {
			p.Logger().Info("another router's admin API began or ended the drain of a worker",
				zap.String("upstream", w.Dial), zap.Bool("drains", w.Draining()))
		}
	}
}

// Secret returns the secret of the hashes of session keys.
func (p *Pool) Secret() *affinity.Secret { return &p.keys.Load().Secret }

// setKeys sets the keys of all hashes.
func (p *Pool) setKeys(k journal.Keys) {
	p.keys.Store(&k)
	p.Ratios.Rekey(k.Seed)
	p.Responses.seed.Store(k.Seed)
}
