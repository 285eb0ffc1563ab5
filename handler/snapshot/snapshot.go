// Package snapshot is the form in which a pool's knowledge survives a restart of Caddy:
// bindings, cache models, and what was learned. It writes and reads values of a [Storage].
// It knows no pool, and decides neither when to write nor what is still right.
//
// # Values
//
// A snapshot is parts of at most 256 KiB, because key-value stores refuse large values, and a
// head that names them. The head lies under the key "head". The parts lie in one of two
// folders, "0" and "1". A writer uses the folder that the last head does not name, and
// writes the head last. So a snapshot that breaks off leaves the one before it intact.
//
// A value begins with 4 bytes of magic, the format's version, the snapshot's random id, and
// its number. The head has the number 0. The value ends with the XXH3 hash of all before.
// Numbers are varints. Each part can be read without the others.
package snapshot

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/zeebo/xxh3"
)

const (
	// version is that of the format. It must also grow if the hashes of sessions or of
	// prompts change.
	version = 2
	magic   = "KVRS"
	// MaxValue bounds a value, in bytes. Consul's limit is 512 KiB after base64.
	MaxValue = 256 << 10
	// maxParts bounds a snapshot at 1 GiB.
	maxParts = 4096

	prefixBytes = len(magic) + 1 + 8
	sumBytes    = 8
)

var (
	// ErrCorrupt says that a value is truncated, damaged, too large, or of another snapshot.
	ErrCorrupt = errors.New("the value is damaged")
	// ErrVersion says that another version of the router wrote the value.
	ErrVersion = errors.New("the value has another version")
	// ErrTooLarge says that a snapshot has more than 4,096 parts.
	ErrTooLarge = errors.New("the snapshot is too large")
)

// Storage keeps values. Its errors satisfy errors.Is(err, fs.ErrNotExist) for a missing key.
// Caddy's storages satisfy it.
type Storage interface {
	Load(ctx context.Context, key string) ([]byte, error)
	Store(ctx context.Context, key string, value []byte) error
	Delete(ctx context.Context, key string) error
}

// Place is where a pool's snapshots lie. It belongs to one router: two that write to one
// place overwrite each other's snapshots.
type Place struct {
	Storage
	prefix string // of the keys
}

// At returns the place of a router's pool.
func At(s Storage, router, pool string) *Place {
	return &Place{s, "kv_router/" + escape(router) + "/" + escape(pool) + "/"}
}

// Name returns the common beginning of the place's keys.
func (p *Place) Name() string { return p.prefix }

// escape makes a name a part of a key, on all file systems.
func escape(name string) string {
	return strings.ReplaceAll(url.QueryEscape(name), ".", "%2E")
}

func (p *Place) partKey(folder byte, number int) string {
	return fmt.Sprintf("%s%d/%d", p.prefix, folder, number)
}

// Head is what must be known before all else.
type Head struct {
	Saved   time.Time
	Secret  affinity.Secret // of the hashes of sessions
	Seed    uint64          // of the hashes of prompts
	Version affinity.Version
	// TextBlock is the bytes in a block of prompt text.
	TextBlock int

	id     uint64
	folder byte
	parts  int
	others int // parts in the other folder, of an older snapshot
}

// Parts returns the number of the snapshot's parts.
func (h *Head) Parts() int { return h.parts }

// ReadHead reads the head. The error satisfies errors.Is(err, fs.ErrNotExist) if there is no
// snapshot.
func ReadHead(ctx context.Context, p *Place) (*Head, error) {
	value, err := p.Load(ctx, p.prefix+"head")
	if err != nil {
		return nil, err
	}
	return parseHead(value)
}

func parseHead(value []byte) (*Head, error) {
	id, r, err := open(value, 0)
	if err != nil {
		return nil, err
	}
	h := &Head{id: id, Saved: time.UnixMilli(r.varint())}
	copy(h.Secret[:], r.bytes(len(h.Secret)))
	h.Seed = r.fixed()
	h.Version = affinity.Version(r.uvarint())
	h.TextBlock = r.small(1 << 20)
	h.folder = byte(r.small(1))
	h.parts, h.others = r.small(1<<30), r.small(1<<30)
	if r.failed || len(r.b) > 0 {
		return nil, ErrCorrupt
	}
	if h.parts > maxParts || h.others > maxParts {
		return nil, ErrTooLarge
	}
	return h, nil
}

func (h *Head) value() []byte {
	b := begin(nil, h.id, 0)
	b = binary.AppendVarint(b, h.Saved.UnixMilli())
	b = append(b, h.Secret[:]...)
	b = binary.LittleEndian.AppendUint64(b, h.Seed)
	b = binary.AppendUvarint(b, uint64(h.Version))
	b = binary.AppendUvarint(b, uint64(h.TextBlock)) //nolint:gosec // positive
	b = append(b, h.folder)
	b = binary.AppendUvarint(b, uint64(h.parts))  //nolint:gosec // positive
	b = binary.AppendUvarint(b, uint64(h.others)) //nolint:gosec // positive
	return seal(b)
}

// ReadPart reads one of the snapshot's parts, which are numbered from 1.
func (h *Head) ReadPart(ctx context.Context, p *Place, number int) (*Part, error) {
	value, err := p.Load(ctx, p.partKey(h.folder, number))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("part %d: %w", number, ErrCorrupt)
	}
	if err != nil {
		return nil, fmt.Errorf("part %d: %w", number, err)
	}
	part, err := parsePart(value, h.id, number)
	if err != nil {
		return nil, fmt.Errorf("part %d: %w", number, err)
	}
	return part, nil
}

func parsePart(value []byte, id uint64, number int) (*Part, error) {
	got, r, err := open(value, number)
	if err == nil && got != id {
		err = ErrCorrupt
	}
	if err != nil {
		return nil, err
	}
	return &Part{r: r, pieces: make([]piece, 1)}, nil
}

// begin appends the beginning of a value.
func begin(b []byte, id uint64, number int) []byte {
	b = append(append(b, magic...), version)
	b = binary.LittleEndian.AppendUint64(b, id)
	return binary.AppendUvarint(b, uint64(number)) //nolint:gosec // positive
}

// seal appends the end of a value.
func seal(b []byte) []byte { return binary.LittleEndian.AppendUint64(b, xxh3.Hash(b)) }

// open checks a value and returns its snapshot's id and its content.
func open(value []byte, number int) (id uint64, r reader, err error) {
	if len(value) < prefixBytes+1+sumBytes || len(value) > MaxValue || string(value[:len(magic)]) != magic {
		return 0, r, ErrCorrupt
	}
	if value[len(magic)] != version {
		return 0, r, ErrVersion
	}
	end := len(value) - sumBytes
	if xxh3.Hash(value[:end]) != binary.LittleEndian.Uint64(value[end:]) {
		return 0, r, ErrCorrupt
	}
	r.b = value[len(magic)+1 : end]
	id = r.fixed()
	if r.uvarint() != uint64(number) || r.failed { //nolint:gosec // positive
		return 0, r, ErrCorrupt
	}
	return id, r, nil
}

// reader reads the content of a value. After a failure it returns zeroes.
type reader struct {
	b      []byte
	failed bool
}

func (r *reader) fail() {
	r.b, r.failed = nil, true
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) varint() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

// small reads a number that must be at most most.
func (r *reader) small(most int) int {
	v := r.uvarint()
	if v > uint64(most) { //nolint:gosec // positive
		r.fail()
		return 0
	}
	return int(v) //nolint:gosec // bounded
}

func (r *reader) fixed() uint64 {
	if b := r.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// bytes returns the next n bytes, nil if there are fewer.
func (r *reader) bytes(n int) []byte {
	if n > len(r.b) {
		r.fail()
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}
