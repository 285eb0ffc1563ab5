package admin

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
)

func runCommand() *cobra.Command {
	cmd := plainCommand("run --to <address>...", "Runs a router without a configuration file", cobra.NoArgs, runRouter)
	cmd.Long = `Runs a router in front of engines, and prints what check says of them. The
commands of kv-router then show it. With --print it only prints the Caddyfile
that does the same, with the key.

It serves HTTP without keys. Listen on a private address, or use a Caddyfile.`
	cmd.Example = "  caddy kv-router run --to gpu-1:8000 --to gpu-2:8000 --listen localhost:8080"
	cmd.Flags().StringSlice("to", nil, "Address of an engine; may repeat")
	cmd.Flags().String("listen", ":8080", "Address to serve at")
	cmd.Flags().String("api-key", "", "Key for the router's own requests to the engines; clients send theirs")
	cmd.Flags().String("api-key-file", "", "File with that key")
	cmd.Flags().String("share", "", "Valkey or Redis by which several routers act as one, such as valkey://10.0.0.5")
	cmd.Flags().Bool("print", false, "Only print the Caddyfile")
	return cmd
}

func runRouter(fl caddycmd.Flags) (int, error) {
	file, err := caddyfileOf(fl)
	if err != nil {
		return exitFailed, err
	}
	if fl.Bool("print") {
		fmt.Print(file)
		return exitOK, nil
	}
	config, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(file), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return exitFailed, err
	}
	for _, w := range warnings {
		fmt.Printf("line %d: %s\n", w.Line, w.Message)
	}
	caddy.TrapSignals()
	if err = caddy.Load(config, false); err != nil {
		return exitFailed, err
	}
	checkPools(6 * time.Second)
	select {}
}

func caddyfileOf(fl caddycmd.Flags) (string, error) {
	to, err := fl.GetStringSlice("to")
	if err != nil || len(to) == 0 {
		return "", errors.New("--to: name at least one engine, such as gpu-1:8000")
	}
	key, keyFile := fl.String("api-key"), fl.String("api-key-file")
	switch {
	case key != "" && keyFile != "":
		return "", errors.New("--api-key and --api-key-file: use one of them")
	case keyFile != "":
		key = "{file." + keyFile + "}"
	}
	site, bind := fl.String("listen"), ""
	if !strings.HasPrefix(site, "https://") {
		// A host in a site's address would only be compared with the header Host.
		host, port, err := net.SplitHostPort(strings.TrimPrefix(site, "http://"))
		if err != nil {
			return "", fmt.Errorf("--listen: must be like localhost:8080: %w", err)
		}
		if site = "http://:" + port; host != "" {
			bind = "\tbind " + token(host) + "\n"
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "{\n\tpersist_config off\n}\n\n%s {\n%s\tkv_router_ready /ready\n\tkv_router", token(site), bind)
	for _, t := range to {
		b.WriteString(" " + token(t))
	}
	if share := fl.String("share"); key != "" || share != "" {
		b.WriteString(" {\n")
		if key != "" {
			fmt.Fprintf(&b, "\t\tworker * {\n\t\t\tapi_key %s\n\t\t}\n", token(key))
		}
		if share != "" {
			fmt.Fprintf(&b, "\t\tshare %s\n", token(share))
		}
		b.WriteString("\t}")
	}
	b.WriteString("\n}\n")
	return b.String(), nil
}

func token(s string) string {
	switch {
	case s != "" && !strings.ContainsAny(s, " \t\r\n\"`#\\"):
		return s
	case !strings.Contains(s, "`"):
		return "`" + s + "`"
	}
	return `"` + strings.ReplaceAll(s, `"`, `\"`) + `"`
}
