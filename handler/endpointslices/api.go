package endpointslices

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
)

// maxAnswer bounds a list, and what one watch reports, in bytes.
const maxAnswer = 64 << 20

// client calls the API server for one list and one watch, with the certificates of then.
type client struct {
	*http.Client
	target target
}

func newClient(t target) (*client, error) {
	set := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.caFile != "" {
		pem, err := os.ReadFile(t.caFile)
		if err != nil {
			return nil, fmt.Errorf("reading ca_file: %w", err)
		}
		set.RootCAs = x509.NewCertPool()
		if !set.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("reading ca_file: %s has no certificate", t.caFile)
		}
	}
	return &client{target: t, Client: &http.Client{
		Transport: &http.Transport{
			Proxy:               http.ProxyFromEnvironment,
			DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			TLSClientConfig:     set,
			TLSHandshakeTimeout: 5 * time.Second,
			ForceAttemptHTTP2:   true,
			IdleConnTimeout:     90 * time.Second, // longer than a watch; ends what CloseIdleConnections leaves behind
			// A connection that is half open is found by pings, not only by the next list.
			HTTP2: &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 5 * time.Second},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // the token goes nowhere else
	}}, nil
}

// call asks the API server for the Service's slices. The verb is what the server must allow.
func (c *client) call(ctx context.Context, verb string, query url.Values) (io.ReadCloser, error) {
	if query == nil {
		query = make(url.Values)
	}
	query.Set("labelSelector", "kubernetes.io/service-name="+c.target.service)
	where := c.target.api + "/apis/discovery.k8s.io/v1/namespaces/" + c.target.namespace + "/endpointslices?" + query.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, where, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "kv_router")
	if c.target.tokenFile != "" {
		token, err := os.ReadFile(c.target.tokenFile)
		if err != nil {
			return nil, fmt.Errorf("reading token_file: %w", err)
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	var answer struct {
		Message string `json:"message"`
	}
	_ = json.NewDecoder(io.LimitReader(resp.Body, 4096)).Decode(&answer)
	said := fmt.Sprintf("the API server answers %d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
	if answer.Message != "" {
		said += ": " + answer.Message
	}
	switch resp.StatusCode {
	case http.StatusForbidden:
		said = fmt.Sprintf("the router may not %s endpointslices in namespace %s: its service account needs a Role there with "+
			"apiGroups [discovery.k8s.io], resources [endpointslices], verbs [get, list, watch] (%s)", verb, c.target.namespace, said)
	case http.StatusUnauthorized:
		said = fmt.Sprintf("the API server does not accept the token of token_file %q (%s)", c.target.tokenFile, said)
	}
	return nil, &refusal{resp.StatusCode, said}
}

type refusal struct {
	code int
	text string
}

func (e *refusal) Error() string { return e.text }

// statusOf returns the status of a refusal, and 0 for other errors.
func statusOf(err error) int {
	if e := new(refusal); errors.As(err, &e) {
		return e.code
	}
	return 0
}

// readList reads the answer to a list: its version and its slices by name.
func readList(r io.Reader, port string) (version string, bySlice map[string]slice, err error) {
	var list struct {
		Kind     string `json:"kind"`
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Items []endpointSlice `json:"items"`
	}
	if err := json.NewDecoder(io.LimitReader(r, maxAnswer)).Decode(&list); err != nil {
		return "", nil, err
	}
	if list.Kind != "EndpointSliceList" { // an error page must not empty the pool
		return "", nil, fmt.Errorf("the answer is of kind %q, want EndpointSliceList", list.Kind)
	}
	bySlice = make(map[string]slice, len(list.Items))
	for i := range list.Items {
		bySlice[list.Items[i].Metadata.Name] = list.Items[i].read(port)
	}
	return list.Metadata.ResourceVersion, bySlice, nil
}

// readEvents reads the answer to a watch, up to its end or to an error. It returns no error: one that
// lasts shows in the next list. changed gets each slice that has changed, or nil in place of one that is
// gone. Without a name, nothing has changed.
func readEvents(r io.Reader, port string, changed func(name string, s *slice)) {
	for d := json.NewDecoder(io.LimitReader(r, maxAnswer)); ; {
		var event struct {
			Type   string        `json:"type"`
			Object endpointSlice `json:"object"`
		}
		if d.Decode(&event) != nil {
			return
		}
		switch o := &event.Object; event.Type {
		case "ADDED", "MODIFIED":
			s := o.read(port)
			changed(o.Metadata.Name, &s)
		case "DELETED":
			changed(o.Metadata.Name, nil)
		case "ERROR": // most often 410
			return
		default: // BOOKMARK
			changed("", nil)
		}
	}
}
