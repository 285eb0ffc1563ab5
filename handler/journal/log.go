package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gofrs/flock"
)

const (
	// writeEvery is the time between two writes, and stateEvery that between two records of what
	// was learned.
	writeEvery, stateEvery = 100 * time.Millisecond, 30 * time.Second
	// entryBytes is the size above which an encoder ends an entry.
	entryBytes = 256 << 10
	// afterError is the time before the next write after one that failed.
	afterError = 10 * time.Second
)

// ErrTaken says that another process has the log.
var ErrTaken = errors.New("another process uses the journal")

// Log is a journal on disk: a file that grows, and the one before. A new file begins with all
// that it takes to understand it, and with the bindings that live. One process at a time may
// have it.
type Log struct {
	path  string
	lock  *flock.Flock
	file  *os.File
	most  int64 // bytes of both files together, about
	size  int64 // of file
	start int64 // what it began with

	mu     sync.Mutex
	status Status
}

// Status is how a log fares.
type Status struct {
	Path    string    `json:"path"`
	Bytes   int64     `json:"bytes"`  // of both files
	Errors  uint64    `json:"errors"` // failed writes
	Written time.Time `json:"-"`
}

// Open opens the log at a path for writing. The error is ErrTaken, or that of the file system.
func Open(path string, most int64) (*Log, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	l := &Log{path: path, most: most, lock: flock.New(path + ".lock"), status: Status{Path: path}}
	if got, err := l.lock.TryLock(); err != nil {
		return nil, err
	} else if !got {
		return nil, ErrTaken
	}
	var err error
	if l.file, err = os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600); err != nil { //nolint:gosec // the operator's
		_ = l.lock.Close()
		return nil, err
	}
	_ = l.file.Chmod(0o600) // it may be there already
	_ = os.Chmod(path+older, 0o600)
	return l, nil
}

// ReadHead reads the head with which the log at a path begins, and when the log was written last.
// The error satisfies errors.Is(err, fs.ErrNotExist) if there is no log.
func ReadHead(path string) (h *Head, written time.Time, err error) {
	f, err := os.Open(path) //nolint:gosec // the operator's
	if errors.Is(err, os.ErrNotExist) {
		f, err = os.Open(path + older) //nolint:gosec // the operator's
	}
	if err != nil {
		return nil, written, err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil {
		written = info.ModTime()
	}
	_, _, err = Read(io.LimitReader(f, 2*maxEntry), func(r *Record) bool {
		h, _ = r.Body.(*Head)
		return false
	})
	if err == nil && h == nil {
		err = errors.New("it does not begin as a journal of this version")
	}
	return h, written, err
}

// The files beside the newest one.
const (
	older  = ".1"
	next   = ".new"
	unread = ".unread"
)

// Read passes all records to each, the oldest first. It removes an end that was not written whole.
func (l *Log) Read(ctx context.Context, each func(*Record)) (skipped Damage, err error) {
	take := func(r *Record) bool {
		each(r)
		return ctx.Err() == nil
	}
	if f, missing := os.Open(l.path + older); missing == nil {
		if _, skipped, err = Read(f, take); err == nil { // it is no directory
			l.status.Bytes, _ = f.Seek(0, io.SeekEnd)
		}
		_ = f.Close()
	}
	whole, more, failed := Read(l.file, take)
	skipped.Entries, skipped.Records = skipped.Entries+more.Entries, skipped.Records+more.Records
	if err = errors.Join(err, failed, ctx.Err()); err == nil {
		if end, seeked := l.file.Seek(0, io.SeekEnd); seeked == nil && end > whole {
			skipped.Entries++
		}
		err = l.end(whole)
	}
	l.size = whole
	l.status.Bytes += whole
	return skipped, err
}

// Reset begins the log anew, because what it has is of no use. A file that is not empty stays under
// another name, which Reset returns: it may be somebody else's.
func (l *Log) Reset() (stays string, err error) {
	if err := os.Remove(l.path + older); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	if info, err := l.file.Stat(); err != nil || info.Size() == 0 {
		return "", err
	}
	if err := os.Rename(l.path, l.path+unread); err != nil {
		return "", err
	}
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_RDWR, 0o600) //nolint:gosec // the operator's
	if err == nil {
		_ = l.file.Close()
		l.file = file
	}
	return l.path + unread, err
}

func (l *Log) end(size int64) error {
	if err := l.file.Truncate(size); err != nil {
		return err
	}
	_, err := l.file.Seek(size, io.SeekStart)
	return err
}

// Close ends the log.
func (l *Log) Close() error { return errors.Join(l.file.Close(), l.lock.Close()) }

// Status returns how the log fares.
func (l *Log) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// Source is what a log asks of its pool.
type Source struct {
	Head func() *Head
	// Dial returns the address of a worker, empty if that is gone.
	Dial func(id uint64) string
	// State returns what was learned. Bindings writes what a reader needs besides: of sessions, all
	// that were used in a time, or for 0, all.
	State    func() *State
	Bindings func(e *Encoder, at time.Time, used time.Duration)
	// Tenants writes what tenants have used, of all or of those that changed in a time.
	Tenants func(e *Encoder, at time.Time, within time.Duration)
	// Failed gets the error of a write to disk.
	Failed func(error)
}

// Keep writes what the outlet takes to the log until the context ends, and then once more. The log
// was read before.
func (o *Outlet) Keep(ctx context.Context, l *Log, s *Source) {
	k := keeper{outlet: o, log: l, source: s}
	k.encoder.out = k.append
	k.startEpoch(time.Now())
	ticker := time.NewTicker(writeEvery)
	defer ticker.Stop()
	for open := true; open; {
		select {
		case <-ctx.Done():
			open, k.lastState = false, time.Time{}
		case <-ticker.C:
		}
		k.write(time.Now())
	}
}

type keeper struct {
	outlet       *Outlet
	log          *Log
	source       *Source
	encoder      Encoder
	unsavedState bool   // there are records since lastState
	gap          bool   // records are lost; bindings may be missing
	lostNoticed  uint64 // of the journal's lost records
	lastState    time.Time
	retry        time.Time // not before
	entries      bytes.Buffer
}

func (k *keeper) write(now time.Time) {
	if n := k.outlet.Lost(); n > k.lostNoticed {
		k.lostNoticed, k.gap = n, true
	}
	if k.gap && !now.Before(k.retry) {
		k.gap = false
		k.startEpoch(now) // what others built on may be lost, too
		k.source.Bindings(&k.encoder, now, 0)
	}
	if k.outlet.Write(&k.encoder, k.source.Dial) {
		k.unsavedState = true
	}
	if k.unsavedState && now.Sub(k.lastState) >= stateEvery {
		k.lastState, k.unsavedState = now, false
		k.encoder.Write(&Record{Kind: KindState, At: now, Body: k.source.State()}, nil)
	}
	k.flush()
	if l := k.log; l.size > l.most/2 && l.size-l.start > l.most/8 || k.encoder.Full() {
		k.rotate(now)
	}
}

func (k *keeper) startEpoch(at time.Time) {
	k.encoder.NewRun()
	k.encoder.StartEpoch(at, k.source.Head())
}

func (k *keeper) append(entry []byte) { k.entries.Write(entry) }

func (k *keeper) flush() {
	k.append(k.encoder.Entry())
	if k.entries.Len() == 0 {
		return
	}
	l, now := k.log, time.Now()
	n := 0
	var err error
	if now.Before(k.retry) {
		k.gap = true
	} else if n, err = l.file.Write(k.entries.Bytes()); err != nil {
		n = 0
		err = errors.Join(err, l.end(l.size))
	}
	k.entries.Reset()
	l.size += int64(n)
	k.note(int64(n), now, err)
}

func (k *keeper) note(n int64, now time.Time, err error) {
	l := k.log
	l.mu.Lock()
	if l.status.Bytes += n; err == nil && n > 0 {
		l.status.Written = now
	}
	if err != nil {
		l.status.Errors++
	}
	l.mu.Unlock()
	if err != nil {
		k.retry, k.gap = now.Add(afterError), true
		k.source.Failed(err)
	}
}

// rotate begins a new file. The present one becomes the older.
func (k *keeper) rotate(now time.Time) {
	l := k.log
	if now.Before(k.retry) {
		return
	}
	file, err := os.OpenFile(l.path+next, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600) //nolint:gosec // the operator's
	if err != nil {
		k.note(0, now, err)
		return
	}
	size := int64(0)
	e := &Encoder{run: k.encoder.run, open: k.encoder.open, out: func(entry []byte) {
		n, failed := file.Write(entry)
		size, err = size+int64(n), errors.Join(err, failed)
	}}
	e.StartEpoch(now, k.source.Head())
	k.source.Bindings(e, now, 0)
	e.Write(&Record{Kind: KindState, At: now, Body: k.source.State()}, nil)
	e.out(e.Entry())
	if err == nil {
		err = errors.Join(os.Rename(l.path, l.path+older), os.Rename(l.path+next, l.path))
	}
	if err != nil {
		_ = file.Close()
		k.note(0, now, fmt.Errorf("beginning a new file: %w", err))
		return
	}
	_ = l.file.Close()
	before := l.size
	l.file, l.size, l.start = file, size, size
	e.out = k.append
	k.encoder = *e
	l.mu.Lock()
	l.status.Bytes = before
	l.mu.Unlock()
	k.note(size, now, nil)
}
