package admin

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

func explainCommand() *cobra.Command {
	cmd := command("explain (<request id> | --file <request>)", "Says why a request went, or would go, to a worker", cobra.MaximumNArgs(1), runExplain)
	cmd.Long = `Says why a request went to its worker. Its id is request_id in the access log and
in the debug log. The router remembers the last 4096 choices.

With --file, it says where a request with this body would go now.`
	cmd.Flags().StringP("file", "f", "", "File of the request's body in JSON; - is standard input")
	cmd.Flags().String("path", "/v1/chat/completions", "The request's path")
	cmd.Flags().StringArrayP("header", "H", nil, "A header of the request, such as 'X-Session-Id: 1'")
	return cmd
}

func runExplain(c *client, fl caddycmd.Flags) (int, error) {
	file := fl.String("file")
	switch {
	case file == "" && fl.NArg() == 1:
		var past []pastView
		if err := c.call(http.MethodGet, "/choices?request_id="+url.QueryEscape(fl.Arg(0)), nil, nil, &past); err != nil {
			return exitFailed, err
		}
		for i := len(past) - 1; i >= 0; i-- { // the oldest first
			v, who := &past[i], ""
			if v.Class != "" {
				who += ", class " + v.Class
			}
			if v.Tenant != "" {
				who += fmt.Sprintf(", tenant %q", v.Tenant)
			}
			if v.Waits != nil {
				fmt.Printf("It has waited in the queue for %s%s: %s.\n%d requests wait.\n", millis(v.Queued), who, strings.Join(v.Waits.Why, "; "), v.Waits.Before)
				continue
			}
			fmt.Printf("%s ago, model %s%s, attempt %d, %d of %d candidates: %s\n%s\n\n",
				age(v.Age), v.Model, who, v.Attempt, len(v.Candidates), v.CandidateCount, v.Dial, v.Sentence)
			writeCandidates(os.Stdout, v.Candidates, v.Unit, v.Candidates[0].Target)
		}
		return exitOK, nil
	case file == "" || fl.NArg() > 0:
		return exitFailed, fmt.Errorf("explain: needs either the id of a request or --file")
	}
	body, err := readInput(file)
	if err != nil {
		return exitFailed, err
	}
	headers := make(http.Header)
	given, err := fl.GetStringArray("header")
	if err != nil {
		return exitFailed, err
	}
	for _, h := range given {
		name, value, ok := strings.Cut(h, ":")
		if !ok {
			return exitFailed, fmt.Errorf("header: must be of the form 'name: value', got %q", h)
		}
		headers.Add(name, strings.TrimSpace(value))
	}
	var x explanation
	if err := c.call(http.MethodPost, "/explain?path="+url.QueryEscape(fl.String("path")), headers, body, &x); err != nil {
		return exitFailed, err
	}
	code := exitOK
	switch {
	case x.Refused != nil:
		fmt.Printf("The router would refuse it with status %d, %s: %s\n", x.Refused.Status, x.Refused.Code, x.Refused.Message)
		code = exitLook
	case x.Waits != nil:
		fmt.Printf("It would wait in the queue after %d others: %s.\n", x.Waits.Before, strings.Join(x.Waits.Why, "; "))
	}
	if x.Chosen != nil {
		fmt.Printf("model %s: %s\n%s\n", x.Plan.Model, x.Chosen.Dial, x.Chosen.Sentence)
		if f := x.Plan.New; f != nil {
			fmt.Println(difference(f))
		}
		fmt.Println()
		writeCandidates(os.Stdout, x.Candidates, x.Unit, x.Chosen.Target)
	}
	for _, w := range x.LeftOut {
		fmt.Printf("left out: %s, %s\n", w.Dial, w.Why)
	}
	return code, nil
}

func writeCandidates(to io.Writer, list []candidateView, unit string, chosen kvscore.Target) {
	heads := []string{"  CANDIDATE", "CACHED", "RUNNING", "TTFT"}
	if unit != "" {
		heads = append(heads, "COST "+unit)
	}
	if unit == kvscore.UnitMilliseconds {
		for _, term := range new(kvscore.Terms).Each() {
			heads = append(heads, term.Name)
		}
	}
	rows := append(make([][]string, 0, 1+len(list)), heads)
	for i := range list {
		x := &list[i]
		cells := []string{"  " + x.Dial, fmt.Sprint(x.OverlapTokens), fmt.Sprint(x.Requests), millis(x.TTFT)}
		if x.Target == chosen {
			cells[0] = "→ " + x.Dial
		}
		if x.Rank > 0 {
			cells[0] += fmt.Sprintf(" rank %d", x.Rank)
		}
		if unit != "" {
			cells = append(cells, fmt.Sprintf("%.1f", x.Cost))
		}
		if unit == kvscore.UnitMilliseconds {
			for _, term := range x.Terms.Each() {
				cells = append(cells, fmt.Sprintf("%.1f", term.Time))
			}
		}
		rows = append(rows, cells)
	}
	writeTable(to, rows)
}
