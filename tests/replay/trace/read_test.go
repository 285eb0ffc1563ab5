package trace

import (
	"bytes"
	"compress/gzip"
	"slices"
	"strings"
	"testing"
	"time"
)

const header = `{"name":"x","block":4,"closed":false}` + "\n"

func TestReadsTheSharedFormat(t *testing.T) {
	text := header + `{"t":1.5,"in":9,"out":3,"think":-1,"h":[0,1],"s":7,"k":2}` + "\n\n" +
		`{"t":0,"in":8,"out":0,"think":-1,"h":[0,5],"s":8,"k":0}` + "\n"
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	z.Write([]byte(text))
	z.Close()
	for _, in := range []string{text, packed.String()} {
		tr, err := Read(strings.NewReader(in))
		if err != nil {
			t.Fatal(err)
		}
		if tr.Name != "x" || tr.BlockTokens != 4 || tr.Closed || !tr.Sessions || len(tr.Requests) != 2 {
			t.Fatalf("got %+v", tr)
		}
		a, b := tr.Requests[0], tr.Requests[1]
		if a.At != 0 || a.Out != 1 || b.At != 1500*time.Millisecond || b.In != 9 || b.Session != 7 || b.Turn != 2 {
			t.Errorf("got %+v and %+v, want them by arrival", a, b)
		}
		if len(a.Blocks) != 2 || len(b.Blocks) != 2 || a.Blocks[0] != b.Blocks[0] || a.Blocks[1] == b.Blocks[1] {
			t.Errorf("blocks %v and %v", a.Blocks, b.Blocks)
		}
	}
}

func TestReadsMooncake(t *testing.T) {
	tr, err := Read(strings.NewReader(`{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}`))
	if err != nil {
		t.Fatal(err)
	}
	r := tr.Requests[0]
	if tr.BlockTokens != 512 || tr.Sessions || r.At != 3*time.Second || len(r.Blocks) != 2 {
		t.Errorf("got %+v", tr)
	}
}

func TestReadsClosedLoops(t *testing.T) {
	tr, err := Read(strings.NewReader(`{"name":"x","block":4,"closed":true}
{"t":0,"in":4,"out":1,"think":0,"h":[0],"s":1,"k":0}
{"t":0,"in":4,"out":1,"think":0,"h":[0],"s":0,"k":0}
{"t":9,"in":4,"out":1,"think":2.5,"h":[0],"s":1,"k":1}`))
	if err != nil {
		t.Fatal(err)
	}
	var order []int
	for _, r := range tr.Requests {
		order = append(order, r.Session, r.Turn)
	}
	if !slices.Equal(order, []int{0, 0, 1, 0, 1, 1}) || tr.Requests[2].Think != 2500*time.Millisecond {
		t.Errorf("got %+v", tr.Requests)
	}
}

func TestBadInputNamesLineAndValue(t *testing.T) {
	closed := `{"name":"x","block":4,"closed":true}` + "\n"
	for name, c := range map[string]struct {
		in   string
		want []string
	}{
		"no arrival":       {header + `{"in":4,"out":1,"h":[1]}`, []string{"line 2", "t is missing"}},
		"too few ids":      {header + `{"t":0,"in":12,"out":1,"h":[1]}`, []string{"line 2", "h has 1 ids", "12 tokens"}},
		"id of two places": {header + `{"t":0,"in":8,"out":1,"h":[1,2]}` + "\n" + `{"t":0,"in":4,"out":1,"h":[2]}`, []string{"line 3", "id 2"}},
		"closed, turns":    {closed + strings.Repeat(`{"t":0,"in":4,"out":1,"h":[1],"s":4,"k":3}`+"\n", 2), []string{"line 3", "k is 3", "session 4"}},
	} {
		_, err := Read(strings.NewReader(c.in))
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %q lacks %q", name, err, want)
			}
		}
	}
}
