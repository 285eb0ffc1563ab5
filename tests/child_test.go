package tests

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// childConfig names the file with the JSON of a Caddy that this program runs instead of the
// tests.
const childConfig = "KV_ROUTER_TEST_CHILD"

// runChild runs a Caddy until it is told to end.
func runChild(file string) {
	cfg, err := os.ReadFile(file) //nolint:gosec // the test's
	if err == nil {
		caddy.TrapSignals()
		err = caddy.Load(cfg, true)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	select {}
}

// child is a Caddy in a process of its own, which can be killed.
type child struct {
	*server
	dir string // of its data
	cmd *exec.Cmd
}

// newChild returns a Caddy that is not started yet.
func newChild(t testing.TB) *child {
	t.Helper()
	dir := t.TempDir()
	c := &child{dir: dir, server: &server{admin: freeAddr(t), addr: freeAddr(t), log: filepath.Join(dir, "caddy.log")}}
	c.url = "http://" + c.addr
	c.globals = "storage file_system " + dir + "/storage"
	c.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}}
	t.Cleanup(func() {
		c.end(syscall.SIGKILL)
		c.client.CloseIdleConnections()
		c.findPanics(t)
		if t.Failed() {
			c.dumpLog(t)
		}
	})
	return c
}

// start starts the process, and waits until it serves.
func (c *child) start(t testing.TB, site string) {
	t.Helper()
	cfg, err := adapt(c.caddyfile(site))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(c.dir, "caddy.json")
	if err = os.WriteFile(file, cfg, 0o600); err != nil {
		t.Fatal(err)
	}
	c.cmd = exec.Command(os.Args[0]) //nolint:gosec // this program
	c.cmd.Env = append(os.Environ(), childConfig+"="+file, "XDG_DATA_HOME="+c.dir, "XDG_CONFIG_HOME="+c.dir)
	output, err := os.Create(filepath.Join(c.dir, "output"))
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	c.cmd.Stdout, c.cmd.Stderr = output, output
	if err = c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "Caddy to serve", func() bool {
		status, _, err := c.get(context.Background(), c.url+"/.config")
		return err == nil && status == http.StatusOK
	})
}

// end ends the process, if it runs.
func (c *child) end(how syscall.Signal) {
	if c.cmd == nil {
		return
	}
	_ = c.cmd.Process.Signal(how)
	_ = c.cmd.Wait()
	c.cmd = nil
	c.client.CloseIdleConnections()
}

// snapshotFiles returns the number of files of snapshots in a storage.
func snapshotFiles(t testing.TB, dir string) (n int) {
	t.Helper()
	_ = filepath.WalkDir(filepath.Join(dir, "kv_router"), func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			n++
		}
		return nil
	})
	return n
}
