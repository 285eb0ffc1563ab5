package pool

import (
	"slices"
	"strings"
	"testing"
)

func TestShareOptions(t *testing.T) {
	t.Setenv("SHARE_PASSWORD", "s3cret")
	for _, c := range []struct {
		share Share
		err   string // a part of it
		addrs []string
	}{
		{share: Share{}},
		{share: Share{Servers: []string{"redis://a"}}, addrs: []string{"a:6379"}},
		{share: Share{Servers: []string{"valkeys://u:p@a:1/2", "rediss://b:2"}, CA: "/none"}, addrs: []string{"a:1", "b:2"}},
		{share: Share{Servers: []string{"valkey://[::1]:7"}, Password: "{env.SHARE_PASSWORD}"}, addrs: []string{"[::1]:7"}},
		{share: Share{Prefix: "x"}, err: "the address of a server is missing"},
		{share: Share{Servers: []string{"http://a"}}, err: "server 1: must be like valkey://"},
		{share: Share{Servers: []string{"redis://a", "redis://u:s3cret@b:x/0"}}, err: "server 2: must be like valkey://"},
		{share: Share{Servers: []string{"redis://:s3cret/def@host:6379/0"}}, err: "escape special characters"},
		{share: Share{Servers: []string{"redis://a", "rediss://b"}}, err: "TLS"},
		{share: Share{Servers: []string{"redis://a"}, CA: "/none"}, err: "tls_ca"},
		{share: Share{Servers: []string{"rediss://a"}, Cert: "/none"}, err: "tls_cert and tls_key"},
	} {
		err := c.share.check()
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || strings.Contains(err.Error(), "s3cret")) {
			t.Errorf("%+v: %v, want %q", c.share, err, c.err)
			continue
		}
		if o, _ := c.share.options(false); c.err == "" && !slices.Equal(o.InitAddress, c.addrs) {
			t.Errorf("%+v: %v", c.share, o.InitAddress)
		}
	}
	s := Share{Servers: []string{"redis://u:p@a"}, Username: "me", Password: "{env.SHARE_PASSWORD}"}
	if o, err := s.options(true); err != nil || o.Username != "me" || o.Password != "s3cret" {
		t.Errorf("%q, %q, %v", o.Username, o.Password, err)
	}
	s = Share{Servers: []string{"rediss://a"}, CA: "/does/not/exist"}
	if _, err := s.options(true); err == nil || !strings.Contains(err.Error(), "tls_ca") {
		t.Error(err)
	}
}
