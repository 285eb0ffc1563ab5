// Package endpointslices is a source of upstreams: the pods behind a Kubernetes Service, as the
// Service's EndpointSlices list them. kv_router's reverse_proxy and Caddy's own can use it. The
// package knows nothing of engines and routing.
package endpointslices

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func init() {
	caddy.RegisterModule(new(Upstreams))
}

// Upstreams provides the pods behind a Kubernetes Service as upstreams. It follows the Service's
// EndpointSlices by the Kubernetes API, and needs no cluster DNS. A pod that terminates gets no
// new requests, unless no other pod is ready.
//
// The API server must let the router's service account get, list and watch endpointslices in the
// Service's namespace. While the API server fails, the last known pods count.
type Upstreams struct {
	// The namespace of the Service. Default: the namespace of the router's own pod.
	Namespace string `json:"namespace,omitempty"`

	// The name of the Service. Required.
	Service string `json:"service,omitempty"`

	// The pods' port: a number, or the name of a port of the Service. A number is the port of the
	// container, and not that of the Service. Default: the Service's only port, or the one that
	// is named http.
	Port string `json:"port,omitempty"`

	// The URL of the API server, for a router outside the cluster. Default: the API server of the
	// cluster that the router's pod runs in.
	API string `json:"api,omitempty"`

	// The file with the bearer token for the API server. It is read for each call, because
	// tokens rotate. Default: the token of the pod's service account; none if api is set.
	TokenFile string `json:"token_file,omitempty"`

	// The file with the certificates that the API server's certificate must lead to. Default:
	// the cluster's; the system's if api is set.
	CAFile string `json:"ca_file,omitempty"`

	watcher *watcher
}

// CaddyModule returns the Caddy module information.
func (*Upstreams) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.upstreams.endpointslices",
		New: func() caddy.Module { return new(Upstreams) },
	}
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens:
//
//	dynamic endpointslices [<namespace>/]<service>[:<port>] {
//		api        <url>
//		token_file <path>
//		ca_file    <path>
//	}
func (u *Upstreams) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	var service string
	if !d.Args(&service) || d.NextArg() {
		return d.ArgErr()
	}
	if namespace, name, ok := strings.Cut(service, "/"); ok {
		u.Namespace, service = namespace, name
		if namespace == "" {
			return d.Err("the namespace before / is empty")
		}
	}
	var given bool
	if u.Service, u.Port, given = strings.Cut(service, ":"); given && u.Port == "" {
		return d.Err("the port after : is empty")
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		option := d.Val()
		field := map[string]*string{"api": &u.API, "token_file": &u.TokenFile, "ca_file": &u.CAFile}[option]
		switch {
		case field == nil:
			return d.Errf("unrecognized endpointslices option '%s'", option)
		case *field != "":
			return d.Errf("%s: given twice", option)
		case !d.AllArgs(field):
			return d.ArgErr()
		}
	}
	return nil
}

// watchers are the watchers by what they follow. Configurations share them, also over a reload.
var watchers = caddy.NewUsagePool()

// Provision begins to follow the Service, unless another source does so already.
func (u *Upstreams) Provision(ctx caddy.Context) error {
	of, err := u.target()
	if err != nil {
		return fmt.Errorf("dynamic endpointslices: %w", err)
	}
	_ = ctx.GetMetricsRegistry().Register(Collector{}) // fails if another source of the configuration has done so
	value, _, err := watchers.LoadOrNew(of, func() (caddy.Destructor, error) {
		return newWatcher(of, relistEvery, leastPause, func() *zap.Logger { // no configuration owns a watcher
			return caddy.Log().Named(string(u.CaddyModule().ID)).With(zap.Stringer("service", of))
		}), nil
	})
	if err != nil {
		return err
	}
	u.watcher = value.(*watcher)
	return nil
}

// Cleanup lets go of the watcher. Requests that are under way still use what it knows.
func (u *Upstreams) Cleanup() error {
	if u.watcher == nil { // Provision failed
		return nil
	}
	_, err := watchers.Delete(u.watcher.target)
	return err
}

// inCluster is where a pod finds what it needs to call the API server.
const inCluster = "/var/run/secrets/kubernetes.io/serviceaccount/"

type target struct{ namespace, service, port, api, tokenFile, caFile string }

// String returns the Service as the Caddyfile names it.
func (t target) String() string {
	if t.port == "" {
		return t.namespace + "/" + t.service
	}
	return t.namespace + "/" + t.service + ":" + t.port
}

var (
	label    = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`) // of RFC 1123
	portName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$`)
)

func (u *Upstreams) target() (target, error) {
	repl := caddy.NewReplacer()
	fill := func(s string) string { return repl.ReplaceAll(s, "") }
	t := target{
		namespace: fill(u.Namespace), service: fill(u.Service), port: fill(u.Port),
		api: strings.TrimSuffix(fill(u.API), "/"), tokenFile: fill(u.TokenFile), caFile: fill(u.CAFile),
	}
	if t.api == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" {
			return t, errors.New("api: required outside a cluster; KUBERNETES_SERVICE_HOST is not set")
		}
		t.api = "https://" + net.JoinHostPort(host, cmp.Or(port, "443"))
		t.tokenFile = cmp.Or(t.tokenFile, inCluster+"token")
		t.caFile = cmp.Or(t.caFile, inCluster+"ca.crt")
	}
	if t.namespace == "" {
		t.namespace = "default"
		if own, err := os.ReadFile(inCluster + "namespace"); err == nil {
			t.namespace = strings.TrimSpace(string(own))
		}
	}
	return t, t.check()
}

func (t *target) check() error {
	number, err := strconv.Atoi(t.port)
	api, bad := url.Parse(t.api)
	switch {
	case !label.MatchString(t.namespace):
		return fmt.Errorf("namespace: %q is not the name of a namespace", t.namespace)
	case !label.MatchString(t.service):
		return fmt.Errorf("service: %q is not the name of a Service", t.service)
	case err == nil && (number < 1 || number > 65535), err != nil && t.port != "" && !portName.MatchString(t.port):
		return fmt.Errorf("port: %q is neither a port number nor the name of a port", t.port)
	case bad != nil || api.Scheme != "https" && api.Scheme != "http" || api.Host == "":
		return fmt.Errorf("api: %q is not a URL such as https://10.0.0.1:6443", t.api)
	}
	return nil
}

// GetUpstreams implements reverseproxy.UpstreamSource. It waits only for the first list of pods,
// right after the start.
func (u *Upstreams) GetUpstreams(r *http.Request) ([]*reverseproxy.Upstream, error) {
	dials, err := u.watcher.dials(r.Context())
	if err != nil {
		return nil, err
	}
	of := make([]reverseproxy.Upstream, len(dials)) // the proxy writes to them, so each request needs its own
	list := make([]*reverseproxy.Upstream, len(dials))
	for i, dial := range dials {
		of[i].Dial, list[i] = dial, &of[i]
	}
	return list, nil
}

// Version changes with the upstreams, so that requests can wait for others. It is 0 while they are
// unknown.
func (u *Upstreams) Version() uint64 { return u.watcher.version.Load() }

// Interface guards
var (
	_ caddy.Provisioner           = (*Upstreams)(nil)
	_ caddy.CleanerUpper          = (*Upstreams)(nil)
	_ caddyfile.Unmarshaler       = (*Upstreams)(nil)
	_ reverseproxy.UpstreamSource = (*Upstreams)(nil)
)

// Collector reads the watchers when metrics are scraped.
type Collector struct{}

var (
	descAge = desc("age_seconds",
		"Time since the API server last reported the pods of the Kubernetes service. At most 60 while all is well.")
	descFailures = desc("failures_total", "Failed calls of the Kubernetes API server.")
)

func desc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("caddy_kv_router_kubernetes_"+name, help, []string{"service"}, nil)
}

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- descAge
	ch <- descFailures
}

// Collect implements prometheus.Collector. Before the first list, a service has failures only.
func (Collector) Collect(ch chan<- prometheus.Metric) {
	seen := make(map[string]bool)
	watchers.Range(func(_, value any) bool {
		w := value.(*watcher)
		service := w.target.String()
		if seen[service] { // another API server has one of this name, too
			return true
		}
		seen[service] = true
		ch <- prometheus.MustNewConstMetric(descFailures, prometheus.CounterValue, float64(w.failures.Load()), service)
		if w.known.Load() != nil {
			age := time.Since(time.Unix(0, w.confirmed.Load()))
			ch <- prometheus.MustNewConstMetric(descAge, prometheus.GaugeValue, age.Seconds(), service)
		}
		return true
	})
}
