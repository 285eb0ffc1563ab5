package tests

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/openai/openai-go"
	"github.com/openai/openai-go/option"
)

// openAI starts engines, Caddy and OpenAI's own client before them.
func openAI(t *testing.T) (openai.Client, *server) {
	t.Helper()
	engines := startEngines(t, 2, canned.Pace{FirstToken: 5 * time.Millisecond, PerWord: time.Millisecond})
	s := startCaddy(t, route(engines))
	return openai.NewClient(option.WithBaseURL(s.url+"/v1/"), option.WithAPIKey("sk-none"), option.WithMaxRetries(0)), s
}

var weather = []openai.ChatCompletionToolParam{{
	Function: openai.FunctionDefinitionParam{
		Name:        "get_weather",
		Description: openai.String("The weather of a city."),
		Parameters: openai.FunctionParameters{
			"type":       "object",
			"properties": map[string]any{"city": map[string]any{"type": "string"}},
			"required":   []string{"city"},
		},
	},
}}

// stream reads a chat's stream to its end.
func stream(t *testing.T, client openai.Client, params openai.ChatCompletionNewParams) openai.ChatCompletion {
	t.Helper()
	params.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	events := client.Chat.Completions.NewStreaming(t.Context(), params)
	defer events.Close()
	var acc openai.ChatCompletionAccumulator
	for events.Next() {
		if !acc.AddChunk(events.Current()) {
			t.Fatalf("a chunk that does not fit: %s", events.Current().RawJSON())
		}
	}
	if err := events.Err(); err != nil {
		t.Fatal(err)
	}
	return acc.ChatCompletion
}

// checkChat checks an answer of words and its usage.
func checkChat(t *testing.T, c *openai.ChatCompletion) {
	t.Helper()
	if len(c.Choices) != 1 || len(strings.Fields(c.Choices[0].Message.Content)) != 24 || c.Choices[0].FinishReason != "stop" {
		t.Errorf("choices %+v", c.Choices)
	}
	if c.Usage.PromptTokens == 0 || c.Usage.CompletionTokens != 24 {
		t.Errorf("usage %+v", c.Usage)
	}
}

func TestOpenAIClientChats(t *testing.T) {
	client, s := openAI(t)
	params := openai.ChatCompletionNewParams{
		Model: "canned",
		Messages: []openai.ChatCompletionMessageParamUnion{
			openai.SystemMessage("You are brief."),
			openai.UserMessage("Which way to the harbour?"),
		},
	}
	c, err := client.Chat.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	checkChat(t, c)
	params.Messages = append(params.Messages, c.Choices[0].Message.ToParam(), openai.UserMessage("And back?"))
	streamed := stream(t, client, params)
	checkChat(t, &streamed)
	s.booksAtZero(t)
}

func TestOpenAIClientCallsTools(t *testing.T) {
	for _, streamed := range []bool{false, true} {
		client, s := openAI(t)
		params := openai.ChatCompletionNewParams{
			Model:    "canned",
			Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Is it raining?")},
			Tools:    weather,
		}
		ask := func() openai.ChatCompletion {
			if streamed {
				return stream(t, client, params)
			}
			c, err := client.Chat.Completions.New(t.Context(), params)
			if err != nil {
				t.Fatal(err)
			}
			return *c
		}
		c := ask()
		if len(c.Choices) != 1 || len(c.Choices[0].Message.ToolCalls) != 1 || c.Choices[0].FinishReason != "tool_calls" {
			t.Fatalf("streamed %v: choices %+v", streamed, c.Choices)
		}
		call := c.Choices[0].Message.ToolCalls[0]
		if call.Function.Name != "get_weather" || call.Function.Arguments != `{"city": "Reykjavík"}` {
			t.Errorf("streamed %v: call %+v", streamed, call)
		}
		params.Messages = append(params.Messages, c.Choices[0].Message.ToParam(), openai.ToolMessage("horizontally", call.ID))
		c = ask()
		checkChat(t, &c)
		s.booksAtZero(t)
	}
}

func TestOpenAIClientCompletes(t *testing.T) {
	client, s := openAI(t)
	for _, prompt := range []openai.CompletionNewParamsPromptUnion{
		{OfString: openai.String("Once upon a time")},
		{OfArrayOfStrings: []string{"Once upon a time"}},
		{OfArrayOfTokens: []int64{1, 5, 9, 1200, 77}},
		{OfArrayOfTokenArrays: [][]int64{{1, 5, 9, 1200, 77}}},
	} {
		params := openai.CompletionNewParams{Model: "canned", Prompt: prompt}
		c, err := client.Completions.New(t.Context(), params)
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Choices) != 1 || len(strings.Fields(c.Choices[0].Text)) != 24 || c.Usage.CompletionTokens != 24 {
			t.Errorf("%+v", c)
		}
		events := client.Completions.NewStreaming(t.Context(), params)
		text := ""
		for events.Next() {
			for _, choice := range events.Current().Choices {
				text += choice.Text
			}
		}
		if err := events.Err(); err != nil || len(strings.Fields(text)) != 24 {
			t.Errorf("streamed: error %v, text %q", err, text)
		}
		events.Close()
	}
	s.booksAtZero(t)
}

func TestOpenAIClientSeesErrorsAndModels(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	client := openai.NewClient(option.WithBaseURL(s.url+"/v1/"), option.WithAPIKey("sk-none"), option.WithMaxRetries(0))
	models, err := client.Models.List(t.Context())
	if err != nil || len(models.Data) != 1 || models.Data[0].ID != "canned" {
		t.Errorf("models %+v, error %v", models, err)
	}
	for _, e := range engines {
		e.SetFault(canned.Fault{Kind: canned.Status, Status: http.StatusBadRequest, Body: `{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}`})
	}
	_, err = client.Chat.Completions.New(t.Context(), openai.ChatCompletionNewParams{
		Model:    "canned",
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("All of it.")},
	})
	apiErr, ok := err.(*openai.Error) //nolint:errorlint // the client returns it bare
	if !ok || apiErr.StatusCode != 400 || apiErr.Message != "too long" || apiErr.Param != "input_tokens" {
		t.Errorf("got the error %#v", err)
	}
	s.booksAtZero(t)
}
