package engine

import (
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/tidwall/gjson"
)

// sglangPhases are SGLang's (python/sglang/srt/disaggregation). Both engines get the request at
// once, with the address of the prefill engine's bootstrap server, and the number of a room where
// they meet. To wait for the prefill would block both. An engine for
// one phase refuses a request without a room. A room that is used twice ends both schedulers. Both
// phases may be aborted by their id at any time. If the transfer fails, the decode engine answers
// with 500.
var sglangPhases = Phases{
	apis:       []string{api.NameChat, api.NameCompletions, api.NameGenerate, api.NameResponses},
	Concurrent: true, TransferTimeout: 30 * time.Second, abort: "/abort_request",
	prefill: (*adapter).sglangPrefill, decode: (*adapter).sglangDecode,
}

// DefaultTransferPort is that of SGLang's bootstrap server.
const DefaultTransferPort = 8998

const nameHost, namePort, nameRoom, namePrefillRank = "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"

// sglangPrefill asks for a plain answer, which has one token.
func (f *adapter) sglangPrefill() {
	f.Body.Set("stream", []byte("false"))
	f.Body.Cut("stream_options")
	f.sglangRoom()
}

func (f *adapter) sglangDecode() {
	f.sglangRoom()
	if f.Phase.Ranks > 1 {
		f.integer(namePrefillRank, int64(f.Phase.Rank))
	}
}

func (f *adapter) sglangRoom() {
	l := f.Phase
	f.text(nameHost, l.Host)
	f.integer(namePort, int64(l.Port))
	f.Body.Set(nameRoom, strconv.AppendUint(nil, l.Room, 10))
	if f.API != api.NameResponses { // whose id is another
		f.text("rid", l.ID)
	}
}

// readSGLangRole reads the role of the server, and the port of its bootstrap server.
func readSGLangRole(info gjson.Result, to *Info) {
	switch role := Role(info.Get("disaggregation_mode").Str); role { //nolint:exhaustive // any other is no role
	case RolePrefill:
		to.TransferPort = within(count(info.Get("disaggregation_bootstrap_port")), maxPort)
		if to.TransferPort == 0 {
			to.TransferPort = DefaultTransferPort
		}
		to.Role = role
	case RoleDecode:
		to.Role = role
	}
}
