package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// message is one message of a chat.
type message struct {
	Role      string          `json:"role"`
	Content   content         `json:"content"`
	ToolCalls json.RawMessage `json:"tool_calls"`
}

// content is a message's text: a string, or parts, which are joined by newlines.
type content string

// UnmarshalJSON reads either form; null is no text.
func (c *content) UnmarshalJSON(b []byte) error {
	if b[0] != '[' {
		var s *string
		if err := json.Unmarshal(b, &s); err != nil {
			return errors.New("content must be a string or a list of parts")
		}
		if s != nil {
			*c = content(*s)
		}
		return nil
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(b, &parts); err != nil {
		return err
	}
	texts := make([]string, len(parts))
	for i, p := range parts {
		if p.Type != "text" && p.Type != "input_text" && p.Type != "output_text" {
			return fmt.Errorf("part of type %q: the model takes text only", p.Type)
		}
		texts[i] = p.Text
	}
	*c = content(strings.Join(texts, "\n"))
	return nil
}

// renderChat returns the prompt of a chat, in ChatML. The prompt of the next turn
// extends the one of this turn and its answer.
func renderChat(messages []message, tools json.RawMessage, generate, cont bool) string {
	var b strings.Builder
	if t := compact(tools); t != "" && t != "[]" {
		b.WriteString("<|im_start|>system\n# Tools\n" + t + "<|im_end|>\n")
	}
	for i, m := range messages {
		b.WriteString("<|im_start|>" + m.Role + "\n" + string(m.Content))
		if t := compact(m.ToolCalls); t != "" && t != "[]" {
			b.WriteString("\n<tool_call>\n" + t + "\n</tool_call>")
		}
		if cont && i == len(messages)-1 {
			return b.String()
		}
		b.WriteString("<|im_end|>\n")
	}
	if generate {
		b.WriteString("<|im_start|>assistant\n")
	}
	return b.String()
}

// compact returns JSON without spaces; empty for null or nothing.
func compact(raw json.RawMessage) string {
	var b bytes.Buffer
	if len(raw) == 0 || string(raw) == "null" || json.Compact(&b, raw) != nil {
		return ""
	}
	return b.String()
}
