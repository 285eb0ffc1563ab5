package main

import (
	"math/rand/v2"
	"strconv"
)

// traffic is what kind of requests a contender is sent.
type traffic int

const (
	// Multi-turn chats without a session.
	_ traffic = iota
	// sessions are chats that name their session in nvext.
	sessions
	// tokens are prompts of token ids, of as many bytes.
	tokens
)

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
	modelName      = "bench"
)

// firstNumber makes all requests' numbers nine digits long. All bodies then
// have the same length, and a number is valid as a JSON number and as a token
// id.
const firstNumber = 100_000_000

// corpus holds the conversations of a cell. A request is one of them with its
// own number at its end, so that no two bodies are the same.
type corpus struct {
	path  string
	convs []conversation
}

// conversation is a body without its number, which comes between the two parts.
type conversation struct {
	head, tail []byte
}

// size is the body's length in bytes.
func (c *conversation) size() int { return len(c.head) + len(strconv.Itoa(firstNumber)) + len(c.tail) }

// newCorpus makes the conversations of a cell. The same cell has the same ones
// in each round. All of them begin with one system prompt, a quarter of the
// body.
func newCorpus(kind traffic, c cell) *corpus {
	k := &corpus{path: chatPath}
	if kind == tokens {
		k.path = completionPath
	}
	for i := range c.conversations {
		var conv conversation
		if kind == tokens {
			conv = tokenPrompt(c, uint64(i)+1)
		} else {
			tail := `"}],"max_tokens":100,"temperature":0.7`
			if kind == sessions {
				tail += `,"nvext":{"session_control":{"session_id":"` + "bench-" + c.name + "-" + strconv.Itoa(i) + `"}}`
			}
			conv = chat(c, tail+"}", uint64(i)+1)
		}
		k.convs = append(k.convs, conv)
	}
	return k
}

// opening is what a body begins with.
func opening(c cell) string {
	s := `{"model":"` + modelName + `","stream":` + strconv.FormatBool(c.stream)
	if c.stream {
		s += `,"stream_options":{"include_usage":true}`
	}
	return s
}

// chat makes one conversation; seed 0 is the system prompt's.
func chat(c cell, tail string, seed uint64) conversation {
	system := prose{rng: source(c, 0)}
	turns := prose{rng: source(c, seed)}
	b := make([]byte, 0, c.size)
	b = append(b, opening(c)...)
	b = append(b, `,"messages":[{"role":"system","content":"`...)
	b = system.append(b, c.size/4)
	const user, assistant = `"},{"role":"user","content":"`, `"},{"role":"assistant","content":"`
	usual := min(max(c.size/12, 100), 4096)
	for {
		room := c.size - len(b) - len(user) - len(tail) - len(strconv.Itoa(firstNumber)) - 1
		question, answer := usual/4+turns.rng.IntN(usual/2), usual/2+turns.rng.IntN(usual)
		b = append(b, user...)
		if room < question+answer+len(user)+len(assistant)+usual {
			b = turns.append(b, max(room, 0))
			break
		}
		b = turns.append(b, question)
		b = append(b, assistant...)
		b = turns.append(b, answer)
	}
	return conversation{append(b, ' '), []byte(tail)}
}

// tokenPrompt makes a prompt of token ids, of as many bytes as a chat.
func tokenPrompt(c cell, seed uint64) conversation {
	const tail = `],"max_tokens":100,"temperature":0.7}`
	system, turns := source(c, 0), source(c, seed)
	b := make([]byte, 0, c.size)
	b = append(b, opening(c)...)
	b = append(b, `,"prompt":[`...)
	const longest = 7 // bytes of an id and its comma
	for len(b)+longest < c.size-len(tail)-len(strconv.Itoa(firstNumber)) {
		rng := turns
		if len(b) < c.size/4 {
			rng = system
		}
		b = strconv.AppendInt(b, rng.Int64N(128_000), 10)
		b = append(b, ',')
	}
	return conversation{b, []byte(tail)}
}

func source(c cell, seed uint64) *rand.Rand {
	return rand.New(rand.NewPCG(uint64(c.size), seed)) //nolint:gosec // text is no secret
}

// prose writes sentences of plain words, as they stand in a JSON string.
type prose struct {
	rng   *rand.Rand
	words int // left of the sentence
}

// rare is what stands between words now and then: escapes, and letters that
// take more than one byte.
var rare = []string{
	`\n\n`, `\n- `, ` \"quoted\" `, ` naïve café `, ` – `, ` 例えば、`, ` \u00e9t\u00e9 `, ` C:\\tmp\\log `, "\\n```go\\n", ` größer `, `\t`, ` 🙂 `,
}

var words = []string{
	"the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as", "at", "be", "this", "have", "from", "or",
	"one", "had", "by", "but", "not", "what", "all", "were", "when", "we", "there", "can", "an", "your", "which", "their", "said", "if",
	"will", "each", "about", "how", "up", "out", "them", "then", "many", "some", "would", "these", "other", "into", "has", "more", "two",
	"could", "function", "return", "value", "system", "request", "answer", "error", "server", "memory", "question", "example", "because",
	"however", "between", "number", "people", "water", "over", "first", "through", "result", "different", "important", "something",
	"understand", "language", "model", "document", "paragraph", "summary", "translate", "following", "please", "explain", "context",
	"structure", "customer", "contract", "account", "research", "history", "temperature", "morning", "evening", "station", "journey",
	"configuration", "parameter", "iteration", "cache", "engine", "latency", "throughput", "measure", "careful", "usually", "probably",
}

// append adds n bytes of text.
func (p *prose) append(b []byte, n int) []byte {
	end := len(b) + n
	for {
		next := words[p.rng.IntN(len(words))] + " "
		switch {
		case p.words == 0:
			p.words = 5 + p.rng.IntN(14)
			next = words[p.rng.IntN(len(words))] + ". "
		case p.rng.IntN(40) == 0:
			next = rare[p.rng.IntN(len(rare))]
		}
		p.words--
		if len(b)+len(next) > end {
			break
		}
		b = append(b, next...)
	}
	for len(b) < end {
		b = append(b, byte('a'+p.rng.IntN(26)))
	}
	return b
}
