package api

import (
	"bytes"
	"strings"
)

// Place is a place in a prompt.
type Place struct {
	Token   int    `json:"token,omitzero"`   // in a prompt of token ids
	Message int    `json:"message,omitzero"` // its number, from 1; 0 if the place is in no message
	Role    string `json:"role,omitzero"`    // of the message, or tools; empty in a prompt without messages
	Byte    int    `json:"byte"`             // in the message, or in the prompt
	Text    string `json:"text,omitzero"`    // from there on
}

// Find returns the place of a part of the canonical text, by the offsets that [Request.Blocks] count. It reads
// the whole body anew: it is for explanations.
func Find(a API, body []byte, from, to int) (at Place) {
	text := canonical(a, body)
	if from, to = min(from, len(text)), min(to, len(text)); from == to {
		return at
	}
	at.Byte = from
	messages := 0
	for i, c := range text[:from+1] {
		switch c {
		case markMessage:
			role, _, _ := bytes.Cut(text[i+1:], []byte{markSep})
			messages++
			at.Message, at.Role, at.Byte = messages, string(role), max(0, from-i-len(role)-2)
		case markTool:
			at.Message, at.Role, at.Byte = 0, "tools", max(0, from-i-1)
		}
	}
	at.Text = strings.ToValidUTF8(string(text[from:to]), " ") // without marks
	return at
}

func canonical(a API, body []byte) []byte {
	p := parse{req: &Request{API: a, prompts: 1, answers: 1}, body: body}
	p.opt = Options{TextBlock: 2*len(body) + 1024}.withDefaults() // no block gets full
	if p.scan() != nil {
		return nil
	}
	a.prompt(&p)
	return p.hash.tail
}
