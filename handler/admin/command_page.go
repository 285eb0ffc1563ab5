package admin

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

func pageCommand() *cobra.Command {
	cmd := command("page", "Serves the page of the admin endpoint to a browser on this machine", cobra.NoArgs, runPage)
	cmd.Long = `Serves the page of the admin endpoint on a loopback address until it is
interrupted. Caddy's admin endpoint itself refuses browsers, and they cannot open
a unix socket.`
	cmd.Flags().String("listen", "127.0.0.1:2020", "Loopback address to serve the page at")
	return cmd
}

func runPage(c *client, fl caddycmd.Flags) (int, error) {
	ln, err := net.Listen("tcp", fl.String("listen")) //nolint:noctx // until the process ends
	if err != nil {
		return exitFailed, err
	}
	at, ok := ln.Addr().(*net.TCPAddr)
	if !ok || !at.IP.IsLoopback() {
		return exitFailed, fmt.Errorf("listen: must be a loopback address, because the page can drain workers; got %s", ln.Addr())
	}
	if resp, err := c.do(http.MethodGet, "/kv_router/", nil, nil); err != nil {
		return exitFailed, err
	} else {
		_ = resp.Body.Close()
	}
	fmt.Printf("http://%s/?pool=%s\n", at, c.pool)
	server := &http.Server{Handler: c.pageProxy(at), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second}
	return exitFailed, server.Serve(ln)
}

// pageProxy passes the requests of the page on to the admin endpoint, and no others.
func (c *client) pageProxy(at *net.TCPAddr) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		steers := r.Method == http.MethodPost && strings.HasPrefix(r.URL.Path, "/pools/") && strings.HasSuffix(r.URL.Path, "drain")
		_, port, _ := net.SplitHostPort(r.Host)
		switch err := ownSite.Check(r); {
		case r.Host != at.String() && r.Host != net.JoinHostPort("localhost", port) || port != fmt.Sprint(at.Port):
			http.Error(w, fmt.Sprintf("open this page as http://%s/", at), http.StatusForbidden)
			return
		case err != nil:
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		case !steers && (r.Method != http.MethodGet || r.URL.Path != "/"):
			http.NotFound(w, r)
			return
		}
		resp, err := c.do(r.Method, "/kv_router"+r.URL.RequestURI(), nil, nil)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer resp.Body.Close()
		for _, name := range []string{"Content-Type", "Content-Security-Policy", "Cache-Control", "X-Content-Type-Options", "Referrer-Policy"} {
			if v := resp.Header.Get(name); v != "" {
				w.Header().Set(name, v)
			}
		}
		_, _ = io.Copy(w, resp.Body)
	})
}
