package api

import (
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

const maxUserID = 4 << 10

// sessionOfUser returns the session in metadata.user_id of Anthropic's Messages; empty if
// there is none. Claude Code writes it in one of two forms:
//
//	{"device_id":"...","account_uuid":"...","session_id":"<session>"}
//	user_<hash>_account_<uuid>_session_<session>
//
// Older versions write the second form. Other user ids name a user or a device, which many
// conversations share.
func sessionOfUser(id string) string {
	if len(id) > maxUserID {
		return ""
	}
	if strings.HasPrefix(id, "user_") {
		if i := strings.LastIndex(id, "_session_"); i >= 0 {
			return strings.TrimSpace(id[i+len("_session_"):])
		}
		return ""
	}
	b := []byte(strings.TrimSpace(id))
	if !gjson.ValidBytes(b) {
		return ""
	}
	return strings.TrimSpace(rawjson.Span{End: len(b)}.Get(b, "session_id").Text(b))
}
