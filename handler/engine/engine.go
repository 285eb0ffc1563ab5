// Package engine contains what differs between vLLM, SGLang, TensorRT-LLM,
// llama.cpp and Dynamo for a router. It reads what servers report about themselves
// ([Ask]) and puts a client's request into an engine's own members and headers
// ([Engine.Adapt]). It does no I/O: callers pass the servers' answers.
package engine

import (
	"slices"
	"strconv"
	"strings"
)

// Engine is what the router knows of one engine.
type Engine struct {
	// Type is one of Names: the operator's, or else the one that the engine shows.
	// It is empty if it is unknown.
	Type string
	// Info is what the engine reported, Settings what the operator set.
	Info     Info
	Settings Settings
}

// kind is an engine type. Its functions cannot use kinds, which depends on them.
type kind struct { // one field for each difference
	// name is the type's name in configurations.
	name string
	// owner is the type's `owned_by` in /v1/models, if that identifies the type.
	owner string
	// shows returns whether a server is of this type. nil: only owner shows that.
	shows func(*server) bool
	// read reads what the server reports. nil: the type reports nothing.
	read func(*server, *Info)
	// takesRank returns whether a request of an API, empty for a request without a
	// name, can name its data-parallel rank in HeaderRank. nil: none can, and the
	// engine chooses the rank itself.
	takesRank func(t Info, name string) bool
	// paths are the ends of further paths at which the engine uses a model.
	paths []string
	// all are the paths, without a version, of requests that each engine must get: to one of
	// several, they would be half done.
	all []string
	// salts says where the engine takes cache salts. Zero: nowhere.
	salts salted
	// tokens are the members for token ids, by API. Completions need none here.
	tokens map[string]string
	// steers are members that do what nvext needs a grant for. nil: none.
	steers []steering
	// always edits each request. nil: nothing.
	always func(*adapter)
	// adapt sets the engine's own members for nvext. nil: nothing.
	adapt func(*adapter)
	// sessions are the APIs in which the engine heeds a session that it holds. In those of
	// someSessions, only some builds do. The words are SGLang's, see OpenSession.
	sessions, someSessions []string
	// tokenize asks for the token ids of a prompt. nil: the engine cannot tell.
	tokenize func(*Question, Post) []byte
	// continues are the APIs besides completions in which the engine goes on with a last
	// message of the assistant. continuing are the members that ask for it.
	continues  []string
	continuing []steadyMember
	// textMember and specialMember are the members with which the tokenizer gets a text, and whether it adds
	// special tokens. Empty: the engine cannot tell the tokens of a text.
	textMember, specialMember string
	// exact are the APIs in which the engine goes on with the ids of an answer, see Exact.
	exact []string
	// cutsAnswers: an answer ends at the end of the context. Others refuse a request whose
	// max_tokens may exceed it.
	cutsAnswers bool
	// fitsCache: the engine refuses a request that is longer than its KV cache.
	fitsCache bool
	// unlimited: completions without a limit have none.
	unlimited bool
	// loads is the page on which the engine reports its load. nil: nowhere.
	loads *loadPage
	// omitsZeroCached: answers omit a count of 0 cached tokens.
	omitsZeroCached bool
	// namesAll: KV events name the adapter and the salt of a prompt in all versions.
	namesAll bool
	// namesSessions: KV events name the session of [HeaderSession], from some version on.
	namesSessions bool
	// hitsLate: the engine reuses no block of a prefill that is still under way.
	hitsLate bool
	// phases is how two engines share a request.
	phases Phases
	// readsNVExt: the engine is a router, which gets nvext and acts on it itself.
	readsNVExt bool
}

// kinds are all engine types. The router tests a server for one after the other. A
// test with an effect comes late: reading TensorRT-LLM's metrics takes them from
// their other readers.
var kinds = []*kind{&sglang, &trtllm, &llamaCpp, &dynamo, &vllm, &other}

// Names are all engine types.
var Names = func() (all []string) {
	for _, k := range kinds {
		all = append(all, k.name)
	}
	return all
}()

// Known returns whether an engine type has that name.
func Known(name string) bool { return slices.Contains(Names, name) }

// Shows returns whether engines of a type show that in their answers. It returns
// false for Other and for an unknown type.
func Shows(name string) bool { return kindOf(name) != &other }

// kindOf returns the engine type of that name, other if there is none.
func kindOf(name string) *kind {
	for _, k := range kinds {
		if k.name == name {
			return k
		}
	}
	return &other
}

// Room returns the most tokens that a request may have, 0 if that is unknown. alone: of the prompt
// alone, and not of prompt and answer.
func (e *Engine) Room() (tokens int64, alone bool) {
	k, tokens := kindOf(e.Type), e.Info.ContextTokens
	if k.fitsCache && e.Info.KVTokens > 0 {
		tokens = min(tokens, e.Info.KVTokens)
	}
	return tokens, k.cutsAnswers
}

// TakesRank returns whether the router can choose the engine's data-parallel rank for
// requests. Otherwise the engine chooses it itself. Some engines take it in some APIs
// only, see [Engine.TakesRankIn].
func (e *Engine) TakesRank() bool { return e.TakesRankIn("") }

// TakesRankIn returns whether the router can choose the rank for a request. name is the
// request's [Request.API].
func (e *Engine) TakesRankIn(name string) bool {
	takes := kindOf(e.Type).takesRank
	return takes != nil && takes(e.Info, name)
}

// ReadsNVExt returns whether the engine gets nvext and acts on it itself.
func (e *Engine) ReadsNVExt() bool { return kindOf(e.Type).readsNVExt }

// before returns whether a version is older than another one. It returns false for
// a version that it cannot read, such as that of a private build.
func before(version string, than ...int) bool {
	version = strings.TrimPrefix(version, "v")
	for _, want := range than {
		digits := len(version) - len(strings.TrimLeft(version, "0123456789"))
		n, err := strconv.Atoi(version[:digits])
		if err != nil {
			return false
		}
		if n != want {
			return n < want
		}
		version = strings.TrimPrefix(version[digits:], ".")
	}
	return false
}

// Names of requests to paths outside the clients' APIs that some engine handles
// specially.
const (
	// Invocations is SageMaker's request to a container: a request of any API that
	// the server has, mostly chat.
	Invocations = "invocations"
	// They open and close a session that SGLang holds.
	openSession  = "open_session"
	closeSession = "close_session"
)

// OpensSession and ClosesSession return whether a request of this name, see [PostTo], opens or
// closes a session that SGLang holds.
func OpensSession(name string) bool  { return name == openSession }
func ClosesSession(name string) bool { return name == closeSession }

// PostTo returns the name of a request to a path outside the clients' APIs, empty
// for a request without a name.
func PostTo(path string) string {
	switch last := path[strings.LastIndexByte(path, '/')+1:]; last {
	case Invocations, openSession, closeSession:
		return last
	}
	return ""
}

// inferences are the ends of the paths outside the clients' APIs at which engines of
// several types use a model. Those of media may leave something in the engine that has an id.
var (
	inferences = []string{
		"/" + Invocations, "/generate", "/chat", "/embed", "/generative_scoring",
		"/chat/completions/batch", "/completions/batch", "/predict", "/judge",
	}
	media = []string{
		"/audio/transcriptions", "/audio/translations", "/audio/speech",
		"/images/generations", "/images/edits", "/images/variations", "/videos",
	}
)

// Infers returns whether some engine uses a model for a POST to a path outside
// the clients' APIs.
func Infers(path string) bool { return infersText(path) || endsIn(path, media) }

func infersText(path string) bool {
	return endsIn(path, inferences) || slices.ContainsFunc(kinds, func(k *kind) bool { return endsIn(path, k.paths) })
}

func endsIn(path string, ends []string) bool {
	path = strings.TrimRight(path, "/")
	return slices.ContainsFunc(ends, func(end string) bool { return strings.HasSuffix(path, end) })
}

// Kept returns under which name the router remembers a text in the answer to a POST outside the
// clients' APIs. It is empty if the text is no id of something that the engine keeps. member is the
// text's name. Words, which clients may choose and which stand in paths, are no ids.
func Kept(path, member, text string) string {
	switch {
	case infersText(path):
	case isID(member) && strings.ContainsFunc(text, func(r rune) bool { return r < 'a' || r > 'z' }):
		return text
	case member == "name" && endsIn(path, []string{"/voices", "/speakers"}):
		return Voice(text)
	}
	return ""
}

// Voice returns the name of an uploaded voice for the router: clients choose such names.
func Voice(name string) string { return "voice " + name }

// Named returns under which names a text in a request outside the clients' APIs may be remembered.
func Named(member, text string) (names []string) {
	switch {
	case isID(member):
		return []string{text}
	case member == "voice", member == "speaker":
		return []string{text, Voice(text)}
	}
	return nil
}

func isID(member string) bool {
	return member == "id" || strings.HasSuffix(member, "_id") || strings.HasSuffix(member, "_ids")
}

// MeansAll returns whether a request for a path means all engines.
func MeansAll(path string) bool {
	return slices.ContainsFunc(kinds, func(k *kind) bool { return slices.Contains(k.all, unversioned(path)) })
}

// Means returns whether such a request means this engine: it has the path, or is of an unknown type.
func (e *Engine) Means(path string) bool {
	k := kindOf(e.Type)
	return k == &other || slices.Contains(k.all, unversioned(path))
}

// DropsCache returns whether an engine drops its KV cache by such a request if it answers with success.
func DropsCache(path string) bool {
	for _, part := range []string{"/flush_cache", "/reset_prefix_cache", "/update_weights", "/release_memory"} {
		if strings.Contains(path, part) {
			return true
		}
	}
	return false
}

func unversioned(path string) string { return strings.TrimRight(strings.TrimPrefix(path, "/v1"), "/") }
