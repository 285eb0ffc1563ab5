package endpointslices

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// endpointSlice is the part of an EndpointSlice that the router uses (discovery.k8s.io/v1).
type endpointSlice struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	AddressType string `json:"addressType"` // IPv4, IPv6 or FQDN
	Endpoints   []struct {
		Addresses  []string `json:"addresses"`
		Conditions struct {
			Ready       *bool `json:"ready"`
			Serving     *bool `json:"serving"`
			Terminating *bool `json:"terminating"`
		} `json:"conditions"`
		TargetRef struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
			UID       string `json:"uid"`
		} `json:"targetRef"`
	} `json:"endpoints"`
	Ports []slicePort `json:"ports"`
}

type slicePort struct {
	Name     string `json:"name"`
	Port     int    `json:"port"`
	Protocol string `json:"protocol"`
}

// endpoint is one address of a pod in one slice.
type endpoint struct {
	pod         string // the same for all addresses of a pod
	dial        string
	serving     bool
	terminating bool
}

type slice struct {
	endpoints []endpoint
	unusable  error // why its endpoints cannot be used
}

func (s *endpointSlice) read(port string) slice {
	if s.AddressType == "FQDN" || len(s.Endpoints) == 0 {
		return slice{} // Kubernetes deprecates host names, and makes none
	}
	number, err := portOf(s.Ports, port)
	if err != nil {
		return slice{unusable: err}
	}
	list := make([]endpoint, 0, len(s.Endpoints))
	for i := range s.Endpoints {
		from := &s.Endpoints[i]
		if len(from.Addresses) == 0 {
			continue
		}
		addr, err := netip.ParseAddr(from.Addresses[0]) // the others are the same pod's
		if err != nil {
			continue
		}
		is := func(condition *bool, unknown bool) bool {
			if condition == nil {
				return unknown
			}
			return *condition
		}
		ready, terminating := is(from.Conditions.Ready, true), is(from.Conditions.Terminating, false)
		e := endpoint{
			pod: from.TargetRef.UID, dial: net.JoinHostPort(addr.WithZone("").String(), number), terminating: terminating,
			// A Service with publishNotReadyAddresses has all pods ready, also those that do not serve.
			serving: is(from.Conditions.Serving, ready) && (ready || terminating),
		}
		if e.pod == "" {
			e.pod = from.TargetRef.Namespace + "/" + from.TargetRef.Name
		}
		if e.pod == "/" {
			e.pod = e.dial
		}
		list = append(list, e)
	}
	return slice{endpoints: list}
}

// portOf returns the number of the wanted port. A number is itself, and a name is looked up in the
// slice's ports. Without either, the only port counts, or the one named http.
func portOf(ports []slicePort, want string) (string, error) {
	if _, err := strconv.Atoi(want); err == nil {
		return want, nil
	}
	ports = slices.DeleteFunc(slices.Clone(ports), func(p slicePort) bool {
		return p.Protocol != "" && p.Protocol != "TCP" || p.Port < 1 || p.Port > 65535
	})
	name := cmp.Or(want, "http")
	i := slices.IndexFunc(ports, func(p slicePort) bool { return p.Name == name })
	if want == "" && len(ports) == 1 {
		i = 0
	}
	if i >= 0 {
		return strconv.Itoa(ports[i].Port), nil
	}
	has := "no TCP port"
	if len(ports) > 0 {
		named := make([]string, len(ports))
		for i, p := range ports {
			named[i] = fmt.Sprintf("%q (%d)", p.Name, p.Port)
		}
		has = "the ports " + strings.Join(named, ", ")
	}
	return "", fmt.Errorf("no port is named %q; the Service has %s", name, has)
}

// merge returns the addresses of the pods to use, of the endpoints of all slices, in order. A pod can
// be in several of them: those of IPv4 and IPv6 addresses, and two while Kubernetes moves it. Pods that
// terminate are used if no other serves, as kube-proxy does.
func merge(bySlice map[string]slice) []string {
	pods := make(map[string]endpoint)
	for _, s := range bySlice {
		for _, e := range s.endpoints {
			if known, ok := pods[e.pod]; ok {
				e.dial = min(e.dial, known.dial) // that of IPv4: an IPv6 address begins with [
				e.serving, e.terminating = e.serving || known.serving, e.terminating || known.terminating
			}
			pods[e.pod] = e
		}
	}
	var dials, terminating []string
	for _, e := range pods {
		switch {
		case e.serving && e.terminating:
			terminating = append(terminating, e.dial)
		case e.serving:
			dials = append(dials, e.dial)
		}
	}
	if len(dials) == 0 {
		dials = terminating
	}
	slices.Sort(dials)
	return slices.Compact(dials)
}
