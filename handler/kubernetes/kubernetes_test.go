package kubernetes

import (
	"strings"
	"testing"
)

// TestDefaults has configurations in a cluster and outside.
func TestDefaults(t *testing.T) {
	t.Setenv("TOKEN_DIR", "/run/tokens")
	for _, c := range []struct {
		host string // of the API server; empty outside a cluster
		u    Upstreams
		want target
		err  string
	}{
		{"10.0.0.1", Upstreams{Service: "vllm"}, target{"default", "vllm", "", "https://10.0.0.1:443", inCluster + "token", inCluster + "ca.crt"}, ""},
		{"fd00::1", Upstreams{Namespace: "n", Service: "vllm", Port: "http"}, target{"n", "vllm", "http", "https://[fd00::1]:443", inCluster + "token", inCluster + "ca.crt"}, ""},
		{"10.0.0.1", Upstreams{Service: "vllm", API: "https://a/k8s/clusters/c/", TokenFile: "{env.TOKEN_DIR}/t"}, target{"default", "vllm", "", "https://a/k8s/clusters/c", "/run/tokens/t", ""}, ""},
		{"", Upstreams{Service: "vllm"}, target{}, "api: required outside a cluster; KUBERNETES_SERVICE_HOST is not set"},
		{"a", Upstreams{}, target{}, `service: "" is not the name of a Service`},
		{"a", Upstreams{Service: "../pods"}, target{}, `service: "../pods" is not the name of a Service`},
		{"a", Upstreams{Service: "vllm", Namespace: "a/b"}, target{}, `namespace: "a/b" is not the name of a namespace`},
		{"a", Upstreams{Service: "vllm", Port: "70000"}, target{}, `port: "70000" is neither a port number nor the name of a port`},
		{"a", Upstreams{Service: "vllm", Port: "HTTP"}, target{}, `port: "HTTP" is neither`},
		{"a", Upstreams{Service: "vllm", API: "10.0.0.1:6443"}, target{}, `api: "10.0.0.1:6443" is not a URL`},
	} {
		t.Setenv("KUBERNETES_SERVICE_HOST", c.host)
		t.Setenv("KUBERNETES_SERVICE_PORT", "")
		got, err := c.u.target()
		switch {
		case c.err == "" && (err != nil || got != c.want):
			t.Errorf("%+v: %+v, %v; want %+v", c.u, got, err, c.want)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("%+v: error %v, want %s", c.u, err, c.err)
		}
	}
}
