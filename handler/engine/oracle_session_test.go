package engine

import (
	"encoding/json"
	"strings"
)

// scoped returns a session's id with the scope of its salt. It returns false for
// an id that is no text.
func scoped(salt string, raw json.RawMessage) (string, bool) {
	var id string
	if raw[0] != '"' || json.Unmarshal(raw, &id) != nil {
		return "", false
	}
	prefix := sum(salt)[:32] + ":"
	switch {
	case len(raw) > 1024:
		return prefix + "sha256:" + sum(string(raw)), true
	case strings.HasPrefix(id, prefix):
		return id, true
	}
	return prefix + id, true
}

// sessions expects the session members of SGLang.
func (o *oracle) sessions(session doc, salt string) {
	if o.kind != SGLang {
		return
	}
	ours := session != nil && o.on("chat completions generate")
	if ours {
		o.want["session_params"] = session
	}
	held := o.held != "" && o.on("chat completions generate")
	if held {
		own, _ := o.want["session_params"].(doc)
		if own == nil {
			own = doc{}
		}
		own["id"] = o.held
		o.want["session_params"] = own
	}
	if salt == "" {
		salt = o.top
	}
	if salt == "" {
		return
	}
	lost := !o.session(o.want, o.raw, salt)
	if held {
		// the client's id is gone
	} else if ours {
		var nv map[string]json.RawMessage
		_ = json.Unmarshal(o.nvRaw, &nv)
		named(session, nv["session_params"], salt)
	} else {
		lost = !o.params(o.want, o.raw, salt) || lost
	}
	if lost {
		o.lacks = append(o.lacks, "session_params")
	}
}

// session scopes a session_id. It returns false for one that is no text, which is
// removed.
func (o *oracle) session(in doc, raw map[string]json.RawMessage, salt string) bool {
	if in["session_id"] == nil {
		return true
	}
	id, ok := scoped(salt, raw["session_id"])
	if in["session_id"] = id; !ok {
		delete(in, "session_id")
	}
	return ok
}

// params scopes session_params. It returns false if they cannot be scoped and are
// removed.
func (o *oracle) params(in doc, raw map[string]json.RawMessage, salt string) bool {
	ok := false
	switch v := in["session_params"].(type) {
	case nil:
		return true
	case doc:
		ok = named(v, raw["session_params"], salt)
	}
	if !ok {
		delete(in, "session_params")
	}
	return ok
}

// named scopes the id in an object. It returns false if that is neither a text nor null.
func named(in doc, raw json.RawMessage, salt string) bool {
	good := true
	pairs(raw, func(name string, raw json.RawMessage) {
		if name != "id" {
			return
		}
		if good = string(raw) == "null"; good {
			delete(in, "id")
		} else {
			in["id"], good = scoped(salt, raw)
		}
	})
	return good
}
