package admin

import (
	"fmt"
	"io"
	"os"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/spf13/cobra"
)

func recordCommand() *cobra.Command {
	var from, to string
	cmd := &cobra.Command{
		Use:   "record [--journal <file>] [--out <file>]",
		Short: "Writes the requests of a journal as a trace for tests/replay",
		Long: `Writes the requests of a journal as a trace: when they arrived, how long prompts
and answers were, and which prompts begin alike. It contains no text and no hash
of one. The router may be running.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if from == "" {
				from = pool.JournalFile(pool.DefaultName)
			}
			var out io.Writer = os.Stdout
			if to != "" {
				file, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600) //nolint:gosec // the operator's
				if err != nil {
					return err
				}
				defer func() { _ = file.Close() }()
				out = file
			}
			n, others, err := journal.Trace(from, out)
			if err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "%d requests; %d others had no known prompt, or no answer\n", n, others)
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "journal", "", "the journal's file; default: that of the pool default")
	cmd.Flags().StringVar(&to, "out", "", "the trace's file; default: standard output")
	return cmd
}
