package quota

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Settings say what each tenant may use.
type Settings struct {
	// Default are the limits of tenants without their own.
	Default []Limit
	// Classes are the limits that a tenant has in a class of requests, by the class's name. They
	// replace all others there.
	Classes map[string][]Limit
	// Tenants are tenants by name.
	Tenants map[string]Tenant
	// CachedWeight is what a prompt token counts that the engine had cached, from 0 to 1.
	CachedWeight float64
}

// Tenant is what one tenant has of its own.
type Tenant struct {
	// Weight is its share of the queue, against 1 of others. 0 stands for 1.
	Weight float64 `json:"weight,omitempty"`
	// Limits replace the default limits, unless they are nil.
	Limits []Limit `json:"limits"`
}

// Bounds of a tenant's weight.
const minWeight, maxWeight = 1e-3, 1e3

// maxTenants bounds the tenants in a file, maxName a tenant's name in bytes.
const maxTenants, maxName = 1 << 20, 128

// ParseTenants reads a file of tenants: a JSON object by name. It refuses unknown members.
func ParseTenants(file []byte) (map[string]Tenant, error) {
	d := json.NewDecoder(bytes.NewReader(file))
	d.DisallowUnknownFields()
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("it must be a JSON object of tenants by name")
	}
	tenants := make(map[string]Tenant)
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, err
		}
		name, _ := t.(string)
		var of Tenant
		if err = d.Decode(&of); err == nil {
			err = CheckLimits(of.Limits)
		}
		_, twice := tenants[name]
		switch {
		case err != nil:
			return nil, fmt.Errorf("tenant %.100q: %w", name, err)
		case twice:
			return nil, fmt.Errorf("tenant %.100q: is there twice", name)
		case len(name) > maxName || len(tenants) == maxTenants:
			return nil, fmt.Errorf("tenant %.100q: there may be %d tenants, with names of %d bytes", name, maxTenants, maxName)
		case of.Weight != 0 && !(of.Weight >= minWeight && of.Weight <= maxWeight):
			return nil, fmt.Errorf("tenant %.100q: weight must be between %g and %g, got %g", name, minWeight, maxWeight, of.Weight)
		}
		tenants[name] = of
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows the object")
	}
	return tenants, nil
}

// Hash returns the number of a tenant or a class, which is the same in all routers. It is 0 only for
// the empty name, which all requests without a tenant share.
func Hash(name string) uint64 {
	if name == "" {
		return 0
	}
	sum := sha256.Sum256([]byte(name)) // so that nobody can choose names of equal hashes
	return max(1, binary.BigEndian.Uint64(sum[:]))
}

// rules are Settings, by the hashes of names.
type rules struct {
	limits  []Limit
	classes map[string]uint64  // the hashes of those that have limits
	byClass map[uint64][]Limit // a class, by its hash
	tenants map[uint64]Tenant
	cached  float64
	any     bool // there is a limit
}

func rulesOf(s *Settings) *rules {
	r := &rules{
		limits: s.Default, cached: s.CachedWeight, any: len(s.Default) > 0,
		classes: make(map[string]uint64), byClass: make(map[uint64][]Limit), tenants: make(map[uint64]Tenant),
	}
	for name, limits := range s.Classes {
		if len(limits) > 0 {
			r.classes[name], r.any = Hash(name), true
			r.byClass[r.classes[name]] = limits
		}
	}
	for name, t := range s.Tenants {
		r.tenants[Hash(name)] = t
		r.any = r.any || len(t.Limits) > 0
	}
	return r
}

// limitsOf returns the limits of an account.
func (r *rules) limitsOf(k Key) []Limit {
	if limits := r.byClass[k.Class]; limits != nil {
		return limits
	}
	if t, ok := r.tenants[k.Tenant]; ok && t.Limits != nil {
		return t.Limits
	}
	return r.limits
}
