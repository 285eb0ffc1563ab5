package main

import (
	"fmt"
	"strings"
	"time"
)

// sessionHeader names the session. It is one of those that kv_router reads by
// default.
const sessionHeader = "X-Session-Id"

// contender is one way to route.
type contender struct {
	name  string
	own   bool                                                   // kv_router: not judged against itself
	ids   bool                                                   // requests have a sessionHeader
	route func(addrs []string, run string, speed float64) string // a directive of a Caddyfile

	command string // another router's, in place of a directive
}

// external reads name=command.
func external(s string) (contender, error) {
	name, command, found := strings.Cut(s, "=")
	if !found || name == "" || command == "" || len(name) > nameWidth {
		return contender{}, fmt.Errorf("%q is not name=command with a name of at most %d bytes", s, nameWidth)
	}
	return contender{name: name, command: command, ids: true}, nil
}

// ours is the contender with which the others are compared.
const ours = "kv_router, ids"

var contenders = []contender{
	{name: "round_robin", route: reverseProxy("round_robin")},
	{name: "least_conn", route: reverseProxy("least_conn")},
	{name: "sticky header", route: reverseProxy("header " + sessionHeader), ids: true},
	{name: "kv_router, no ids", route: kvRouter, own: true},
	{name: ours, route: kvRouter, own: true, ids: true},
}

// kvRouter returns kv_router with its defaults and a pool of its own.
func kvRouter(addrs []string, run string, _ float64) string {
	return fmt.Sprintf("kv_router %s {\n\t\tpool %s\n\t}", strings.Join(addrs, " "), run)
}

// failDuration is how long reverse_proxy remembers a failure, in the engines' time.
const failDuration = 10 * time.Second

// reverseProxy returns Caddy's reverse_proxy with one of its policies. It has the
// options that an operator adds so that a dead engine costs little: by default Caddy
// neither retries nor remembers failures. Engines close connections that are idle for 5 s.
// Caddy closes them before, as it does not send a request again that meets such an end.
func reverseProxy(policy string) func([]string, string, float64) string {
	return func(addrs []string, _ string, speed float64) string {
		return fmt.Sprintf("reverse_proxy %s {\n\t\tlb_policy %s\n\t\tlb_retries 3\n\t\tfail_duration %s\n\t\ttransport http {\n\t\t\tkeepalive 2s\n\t\t}\n\t}",
			strings.Join(addrs, " "), policy, time.Duration(float64(failDuration)/speed))
	}
}
