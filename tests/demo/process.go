package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/process"
)

// patience is how long another router may take to start.
const patience = 4 * time.Minute

// startProcess starts another router with a shell, which gives its place to the command. The
// placeholders of the command are those of -with.
func startProcess(command, listen string, addrs []string, log string) (*process.Process, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, err
	}
	command = strings.NewReplacer("{listen}", listen, "{host}", host, "{port}", port,
		"{upstreams}", "http://"+strings.Join(addrs, " http://")).Replace(command)
	return process.Start(exec.Command("/bin/sh", "-c", "exec "+command), log) //nolint:gosec // the user's
}

// listsModels returns an error if the router does not list the models of its engines.
func listsModels(ctx context.Context, listen string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listen+"/v1/models", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s", req.URL, resp.Status)
	}
	_ = resp.Body.Close() //nolint:errcheck // nothing is read
	return err
}
