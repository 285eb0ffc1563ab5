package journal

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/valkey-io/valkey-go"
)

// Valkey is a [Stream] in a Valkey or Redis server, 6.2 or later.
type Valkey struct {
	client valkey.Client
	pool   string       // what its keys begin with
	latest atomic.Int64 // the server's time of the last Append, Unix milliseconds; 0 if there was none
}

// isStale returns whether only a new connection can help. The server at the other end is not the primary
// any more, or does not know the password. The address may lead to another server by now, and the
// password may be another one.
func isStale(err error) bool {
	answer, ok := errors.AsType[*valkey.ValkeyError](err)
	if !ok {
		return false
	}
	word, _, _ := strings.Cut(answer.Error(), " ")
	return slices.Contains([]string{"READONLY", "LOADING", "MASTERDOWN", "NOAUTH", "WRONGPASS"}, word)
}

const readAtOnce = 512

// DialValkey connects to a server. All keys begin with the prefix, and are those of the pool.
func DialValkey(o valkey.ClientOption, prefix, pool string) (*Valkey, error) {
	o.DisableCache, o.DisableRetry = true, true // a command that was sent twice is two entries
	o.Dialer.Timeout, o.ConnWriteTimeout = appendTimeout, 2*appendTimeout
	o.ClientName = "kv_router"
	client, err := valkey.NewClient(o)
	if err != nil {
		return nil, err
	}
	return &Valkey{client: client, pool: prefix + "{" + pool + "}:"}, nil // one slot of a cluster
}

func (v *Valkey) key(name string) string { return v.pool + name }

// Close implements [Stream].
func (v *Valkey) Close() { v.client.Close() }

// Keys implements [Stream].
func (v *Valkey) Keys(ctx context.Context, own Keys) (Keys, error) {
	b := v.client.B()
	done := v.client.DoMulti(ctx, b.Setnx().Key(v.key("keys")).Value(valkey.BinaryString(own.bytes())).Build(), b.Get().Key(v.key("keys")).Build())
	text, err := done[1].AsBytes()
	if err != nil {
		return own, errors.Join(done[0].Error(), err)
	}
	keys, ok := parseKeys(text)
	if !ok {
		return own, fmt.Errorf("%s has %d bytes, which are no keys of kv_router", v.key("keys"), len(text))
	}
	return keys, nil
}

// Append implements [Stream].
func (v *Valkey) Append(ctx context.Context, s *Sent) error {
	id := binary.LittleEndian.AppendUint64(nil, s.Router)
	at, err := v.client.Do(ctx, v.client.B().Xadd().Key(v.key("journal")).Id("*").FieldValue().
		FieldValue("r", valkey.BinaryString(id)).FieldValue("n", strconv.FormatUint(s.Number, 10)).
		FieldValue("b", strconv.FormatUint(s.Epoch, 10)).FieldValue("e", valkey.BinaryString(s.Entries)).Build()).ToString()
	if ms, _, ok := strings.Cut(at, "-"); ok {
		n, _ := strconv.ParseInt(ms, 10, 64) // 0 trims nothing
		v.latest.Store(n)
	}
	return err
}

// Read implements [Stream].
func (v *Valkey) Read(ctx context.Context, from string, wait time.Duration, each func(*Sent)) (string, error) {
	from = cmp.Or(from, "0")
	cmd := v.client.B().Xread().Count(readAtOnce)
	var done valkey.ValkeyResult
	if wait > 0 {
		done = v.client.Do(ctx, cmd.Block(wait.Milliseconds()).Streams().Key(v.key("journal")).Id(from).Build())
	} else {
		done = v.client.Do(ctx, cmd.Streams().Key(v.key("journal")).Id(from).Build())
	}
	streams, err := done.AsXRead()
	if valkey.IsValkeyNil(err) {
		return from, nil
	}
	if err != nil {
		return from, err
	}
	for _, e := range streams[v.key("journal")] {
		from = e.ID
		if s, ok := parseSent(e.FieldValues); ok {
			each(s)
		}
	}
	return from, nil
}

// parseSent returns what a router has appended; false if another program has.
func parseSent(fields map[string]string) (*Sent, bool) {
	id := []byte(fields["r"])
	number, err := strconv.ParseUint(fields["n"], 10, 64)
	if len(id) != 8 || err != nil || number == 0 {
		return nil, false
	}
	epoch, _ := strconv.ParseUint(fields["b"], 10, 64)
	return &Sent{Router: binary.LittleEndian.Uint64(id), Number: number, Epoch: epoch, Entries: []byte(fields["e"])}, true
}

// Trim implements [Stream]. A stream that nobody uses ends by itself.
func (v *Valkey) Trim(ctx context.Context, entries int64) error {
	b := v.client.B()
	oldest := strconv.FormatInt(max(0, v.latest.Load()-PastTime.Milliseconds()), 10) // by the server's clock
	var err error
	for _, done := range v.client.DoMulti(ctx,
		b.Xtrim().Key(v.key("journal")).Maxlen().Almost().Threshold(strconv.FormatInt(entries, 10)).Build(),
		b.Xtrim().Key(v.key("journal")).Minid().Almost().Threshold(oldest).Build(),
		b.Pexpire().Key(v.key("journal")).Milliseconds((2 * PastTime).Milliseconds()).Build(),
	) {
		err = errors.Join(err, done.Error())
	}
	return err
}

// renewClaim acts on a claim if it still has the value.
var renewClaim = valkey.NewLuaScript(`if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("PEXPIRE", KEYS[1], ARGV[2]) end return 0`)

// Claim implements [Claims].
func (v *Valkey) Claim(ctx context.Context, name, value string, ttl time.Duration) (mine bool, err error) {
	err = v.client.Do(ctx, v.client.B().Set().Key(v.key(name)).Value(value).Nx().Px(ttl).Build()).Error()
	if valkey.IsValkeyNil(err) {
		return false, nil
	}
	return err == nil, err
}

// Find implements [Claims].
func (v *Valkey) Find(ctx context.Context, name string) (value string, left time.Duration, err error) {
	b, key := v.client.B(), v.key(name)
	done := v.client.DoMulti(ctx, b.Get().Key(key).Build(), b.Pttl().Key(key).Build())
	if value, err = done[0].ToString(); valkey.IsValkeyNil(err) {
		return "", 0, nil
	}
	ms, _ := done[1].AsInt64()
	return value, time.Duration(max(0, ms)) * time.Millisecond, err
}

// Renew implements [Claims]. A time of 0 deletes a key.
func (v *Valkey) Renew(ctx context.Context, name, value string, ttl time.Duration) (bool, error) {
	n, err := renewClaim.Exec(ctx, v.client, []string{v.key(name)}, []string{value, strconv.FormatInt(ttl.Milliseconds(), 10)}).AsInt64()
	return n == 1, err
}
