// Command caddy is a Caddy web server with the kv_router module in it.
package main

import (
	_ "time/tzdata"

	_ "github.com/caddy-kvrouter/kvrouter"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

func main() {
	caddycmd.Main()
}
