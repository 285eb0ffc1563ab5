package canned

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
)

const (
	// firstPort is the first one that servers here listen on. The last one is
	// below the range of ephemeral ports.
	firstPort = 12000
	// shares is how many processes may have ports of their own.
	shares = 20
	// shareSize is how many ports one of them has.
	shareSize = 1000
)

// portRange is what ports are taken from.
type portRange struct {
	first, size int
	held        net.Listener  // stands for it; nil when it is everybody's
	taken       atomic.Uint32 // how many were, free or not
}

// share returns this process's ports. A server that is stopped and comes back at
// its port needs it not to be taken meanwhile, by another package's tests for
// instance. The port that stands for the share is held until the process ends.
var share = sync.OnceValue(func() *portRange {
	for i := range shares {
		if ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", firstPort-shares+i)); err == nil {
			return &portRange{first: firstPort + i*shareSize, size: shareSize, held: ln}
		}
	}
	all := &portRange{first: firstPort, size: shares * shareSize}
	all.taken.Store(uint32(rand.IntN(all.size))) //nolint:gosec // not a secret
	return all
})

// next returns the ports in turn, so that none is there again before all others
// were: who closed it may still count on it.
func (r *portRange) next() int { return r.first + int(r.taken.Add(1))%r.size }

// Listen listens on a free loopback port below the range of ephemeral ports. No
// client's own port can then take its place, and no client connects to itself.
// As long as few processes do so, each has its own share of the ports.
func Listen() (net.Listener, error) {
	var lastErr error
	for range 100 {
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", share().next()))
		if err == nil {
			return ln, nil
		}
		lastErr = err
	}
	return nil, fmt.Errorf("finding a free port: %w", lastErr)
}

// FreeAddr returns a loopback address on which no process listens now.
func FreeAddr() (string, error) {
	ln, err := Listen()
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}

// FreeAddrs returns such addresses with ports that follow each other.
func FreeAddrs(n int) (addrs []string, err error) {
	for last := uint16(0); len(addrs) < n; {
		addr, err := FreeAddr()
		if err != nil {
			return nil, err
		}
		port := netip.MustParseAddrPort(addr).Port()
		if port != last+1 {
			addrs = nil
		}
		addrs, last = append(addrs, addr), port
	}
	return addrs, nil
}
