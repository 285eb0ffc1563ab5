// Package kubernetes is for tests with a Kubernetes API server. It has a small one, which keeps
// EndpointSlices to be listed and watched, and a client that writes them, also to a real one.
package kubernetes

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Slice is an EndpointSlice with one pod.
type Slice struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name            string            `json:"name"`
		ResourceVersion string            `json:"resourceVersion,omitempty"`
		Labels          map[string]string `json:"labels"`
	} `json:"metadata"`
	AddressType string     `json:"addressType"`
	Endpoints   []Endpoint `json:"endpoints"`
	Ports       []Port     `json:"ports"`
}

// Endpoint is one pod of a slice.
type Endpoint struct {
	Addresses  []string  `json:"addresses"`
	Conditions Condition `json:"conditions"`
	TargetRef  struct {
		Kind string `json:"kind"`
		Name string `json:"name"`
		UID  string `json:"uid"`
	} `json:"targetRef"`
}

// Condition is the state of a pod.
type Condition struct {
	Ready       bool `json:"ready"`
	Serving     bool `json:"serving"`
	Terminating bool `json:"terminating"`
}

// The states of a pod in the order of its life.
var (
	Loading     = Condition{}
	Ready       = Condition{Ready: true, Serving: true}
	Terminating = Condition{Serving: true, Terminating: true}
)

// Port is a port of the pods of a slice.
type Port struct {
	Name     string `json:"name"`
	Port     int    `json:"port"`
	Protocol string `json:"protocol"`
}

// Client writes slices of one Service.
type Client struct {
	url, service, token string
	http                *http.Client
}

// NewClient returns a client of an API server with a certificate.
func NewClient(api, token string, ca []byte, namespace, service string) *Client {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &Client{
		url: api + "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices", service: service, token: token,
		http: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}},
	}
}

// Set writes the slice of a pod, which has the name and the address of the pod.
func (c *Client) Set(ctx context.Context, pod, address string, port int, state Condition) error {
	e := Endpoint{Addresses: []string{address}, Conditions: state}
	e.TargetRef.Kind, e.TargetRef.Name, e.TargetRef.UID = "Pod", pod, "uid-"+pod
	s := &Slice{
		APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice", AddressType: "IPv4",
		Endpoints: []Endpoint{e}, Ports: []Port{{"http", port, "TCP"}},
	}
	s.Metadata.Name, s.Metadata.Labels = pod, map[string]string{"kubernetes.io/service-name": c.service}
	code, err := c.do(ctx, http.MethodPost, c.url, s)
	if code == http.StatusConflict {
		_, err = c.do(ctx, http.MethodPut, c.url+"/"+pod, s)
	}
	return err
}

// Delete deletes the slice of a pod.
func (c *Client) Delete(ctx context.Context, pod string) error {
	_, err := c.do(ctx, http.MethodDelete, c.url+"/"+pod, nil)
	return err
}

func (c *Client) do(ctx context.Context, method, url string, s *Slice) (status int, err error) {
	body, err := json.Marshal(s)
	if err != nil {
		return 0, err
	}
	if s == nil {
		body = nil
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+c.token)
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if resp.StatusCode >= http.StatusBadRequest {
		return resp.StatusCode, fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, answer)
	}
	return resp.StatusCode, nil
}
