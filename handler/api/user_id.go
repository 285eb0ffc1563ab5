package api

import (
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// maxUserID is the longest user id that is searched for a session, in bytes.
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
	if id = strings.TrimSpace(id); id == "" || id[0] != '{' {
		return ""
	}
	b, session := []byte(id), ""
	c, _ := rawjson.Open(b)
	for c.Next() {
		is := string(c.Key()) == "session_id"
		if v := c.Value(); is {
			session = v.Text(b)
		}
	}
	if c.Err != nil || !c.Alone() {
		return ""
	}
	return strings.TrimSpace(session)
}
