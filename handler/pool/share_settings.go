package pool

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"reflect"

	"github.com/valkey-io/valkey-go"

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
