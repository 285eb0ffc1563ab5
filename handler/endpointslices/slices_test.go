package endpointslices

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// sliceJSON is a slice with the members that differ between tests.
func sliceJSON(name, family, ports string, endpoints ...string) string {
	return fmt.Sprintf(`{"metadata":{"name":%q},"addressType":%q,"ports":%s,"endpoints":[%s]}`,
		name, family, ports, strings.Join(endpoints, ","))
}

// pod is an endpoint of a pod with a uid. The conditions are a JSON object.
func pod(uid, address, conditions string) string {
	return fmt.Sprintf(`{"addresses":[%q],"conditions":%s,"targetRef":{"kind":"Pod","uid":%q}}`, address, conditions, uid)
}

const (
	web   = `[{"name":"http","port":8000,"protocol":"TCP"}]`
	ready = `{"ready":true,"serving":true,"terminating":false}`
	ends  = `{"ready":false,"serving":true,"terminating":true}`
	ended = `{"ready":false,"serving":false,"terminating":true}`
	loads = `{"ready":false,"serving":false,"terminating":false}`
)

// read reads slices as a list has them.
func read(t testing.TB, port string, list ...string) []string {
	t.Helper()
	_, bySlice, err := readList(strings.NewReader(listJSON("1", list...)), port)
	if err != nil {
		t.Fatal(err)
	}
	return merge(bySlice)
}

func listJSON(version string, list ...string) string {
	return fmt.Sprintf(`{"kind":"EndpointSliceList","metadata":{"resourceVersion":%q},"items":[%s]}`, version, strings.Join(list, ","))
}

// TestPodsThatAreUsed has the cases of the conditions, and of pods that are in several slices.
func TestPodsThatAreUsed(t *testing.T) {
	one := func(endpoints ...string) []string { return []string{sliceJSON("a", "IPv4", web, endpoints...)} }
	for name, c := range map[string]struct {
		list []string
		want string
	}{
		"ready":                  {one(pod("1", "10.0.0.1", ready), pod("2", "10.0.0.2", ready)), "10.0.0.1:8000 10.0.0.2:8000"},
		"unknown is ready":       {one(pod("1", "10.0.0.1", "{}")), "10.0.0.1:8000"},
		"loading":                {one(pod("1", "10.0.0.1", loads)), ""},
		"publishNotReady":        {one(pod("1", "10.0.0.1", `{"ready":true,"serving":false}`)), ""},
		"terminating":            {one(pod("1", "10.0.0.1", ready), pod("2", "10.0.0.2", ends)), "10.0.0.1:8000"},
		"only terminating":       {one(pod("1", "10.0.0.1", loads), pod("2", "10.0.0.2", ends)), "10.0.0.2:8000"},
		"terminated":             {one(pod("1", "10.0.0.1", ended)), ""},
		"no pods":                {[]string{`{"metadata":{"name":"a"},"addressType":"IPv4","endpoints":null,"ports":null}`}, ""},
		"host names":             {[]string{sliceJSON("a", "FQDN", web, pod("1", "a.example", ready))}, ""},
		"IPv6":                   {[]string{sliceJSON("a", "IPv6", web, pod("1", "fd00::1", ready))}, "[fd00::1]:8000"},
		"no reference":           {one(`{"addresses":["10.0.0.1"]}`, `{"addresses":["10.0.0.2"]}`), "10.0.0.1:8000 10.0.0.2:8000"},
		"reference without uid":  {one(`{"addresses":["10.0.0.1"],"targetRef":{"namespace":"n","name":"p"}}`), "10.0.0.1:8000"},
		"garbage is no address":  {one(pod("1", "10.0.0.1:80", ready), pod("2", "", ready), `{"addresses":[]}`), ""},
		"first of two addresses": {one(`{"addresses":["10.0.0.1","10.0.0.9"]}`), "10.0.0.1:8000"},
		"dual stack": {
			[]string{sliceJSON("6", "IPv6", web, pod("1", "fd00::1", ready)), sliceJSON("4", "IPv4", web, pod("1", "10.0.0.1", ready))},
			"10.0.0.1:8000",
		},
		"moves between slices": {
			[]string{sliceJSON("a", "IPv4", web, pod("1", "10.0.0.1", loads)), sliceJSON("b", "IPv4", web, pod("1", "10.0.0.1", ready))},
			"10.0.0.1:8000",
		},
		"terminates in one of two slices": {
			[]string{sliceJSON("a", "IPv4", web, pod("1", "10.0.0.1", ends)), sliceJSON("b", "IPv4", web, pod("1", "10.0.0.1", ready), pod("2", "10.0.0.2", ready))},
			"10.0.0.2:8000",
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 4 { // in another order of the map
				if got := strings.Join(read(t, "", c.list...), " "); got != c.want {
					t.Errorf("got %q, want %q", got, c.want)
				}
			}
		})
	}
}

func TestPorts(t *testing.T) {
	two := `[{"name":"metrics","port":9000},{"name":"http","port":8000,"protocol":"TCP"}]`
	for _, c := range []struct{ ports, want, number, problem string }{
		{web, "", "8000", ""},
		{`[{"name":"","port":8000}]`, "", "8000", ""},
		{`[{"name":"grpc","port":9001}]`, "", "9001", ""},
		{two, "", "8000", ""},
		{two, "metrics", "9000", ""},
		{two, "8080", "8080", ""},
		{`null`, "8080", "8080", ""},
		{`null`, "", "", `no port is named "http"; the Service has no TCP port`},
		{two, "web", "", `no port is named "web"; the Service has the ports "metrics" (9000), "http" (8000)`},
		{`[{"name":"http","port":8000,"protocol":"UDP"}]`, "http", "", "no TCP port"},
		{`[{"name":"http","port":70000}]`, "", "", "no TCP port"},
	} {
		var ports []slicePort
		if err := json.Unmarshal([]byte(c.ports), &ports); err != nil {
			t.Fatal(err)
		}
		number, err := portOf(ports, c.want)
		if number != c.number || (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
			t.Errorf("port %q of %s: %q, %v; want %q, %q", c.want, c.ports, number, err, c.number, c.problem)
		}
	}
}

// FuzzAnswers feeds answers of the API server to the readers. What they accept must be addresses.
func FuzzAnswers(f *testing.F) {
	a := sliceJSON("a", "IPv4", web, pod("1", "10.0.0.1", ready), pod("2", "fe80::1%eth0", ends))
	f.Add([]byte(listJSON("7", a, sliceJSON("b", "IPv6", web, pod("1", "fd00::1", "{}")))), "")
	f.Add([]byte(`{"type":"ADDED","object":`+a+`}{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"8"}}}{"type":"DELETED","object":`+a+`}`), "http")
	f.Add([]byte(`{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old resource version"}}`), "8000")
	f.Add([]byte(`{"type":"ERROR","object":{"code":403}}`), "8000")
	f.Fuzz(func(t *testing.T, answer []byte, port string) {
		if (&target{namespace: "n", service: "s", api: "https://a", port: port}).check() != nil {
			return
		}
		_, bySlice, err := readList(bytes.NewReader(answer), port)
		if err != nil {
			bySlice = make(map[string]slice)
		}
		readEvents(bytes.NewReader(answer), port, func(name string, s *slice) {
			if s == nil {
				delete(bySlice, name)
			} else {
				bySlice[name] = *s
			}
		})
		dials := merge(bySlice)
		if !slices.IsSorted(dials) {
			t.Errorf("%v", dials)
		}
		for _, dial := range dials {
			if _, err := netip.ParseAddrPort(dial); err != nil {
				t.Error(err)
			}
		}
	})
}

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
