package tests

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/openai/openai-go"
	"github.com/openai/openai-go/option"
	"github.com/openai/openai-go/packages/ssestream"
	"github.com/openai/openai-go/responses"
)

// respond asks for a response, streamed or not.
func respond(t *testing.T, client openai.Client, params responses.ResponseNewParams, streamed bool) responses.Response {
	t.Helper()
	if !streamed {
		r, err := client.Responses.New(t.Context(), params)
		if err != nil {
			t.Fatal(err)
		}
		return *r
	}
	events := client.Responses.NewStreaming(t.Context(), params)
	defer events.Close()
	var last responses.Response
	text := ""
	for n := int64(0); events.Next(); n++ {
		e := events.Current()
		if e.SequenceNumber != n {
			t.Errorf("event %d has the number %d", n, e.SequenceNumber)
		}
		switch e := e.AsAny().(type) {
		case responses.ResponseTextDeltaEvent:
			text += e.Delta
		case responses.ResponseCompletedEvent:
			last = e.Response
		}
	}
	if err := events.Err(); err != nil {
		t.Fatal(err)
	}
	if text != last.OutputText() {
		t.Errorf("the deltas say %q, the response %q", text, last.OutputText())
	}
	return last
}

func TestOpenAIClientAsksForResponses(t *testing.T) {
	for _, streamed := range []bool{false, true} {
		client, s := openAI(t)
		input := responses.ResponseInputParam{responses.ResponseInputItemParamOfMessage(responses.ResponseInputMessageContentListParam{
			responses.ResponseInputContentParamOfInputText("Is it raining here?"),
			{OfInputImage: &responses.ResponseInputImageParam{Detail: "auto", ImageURL: openai.String("data:image/png;base64," + pixel)}},
		}, "user")}
		params := responses.ResponseNewParams{
			Model:        "canned",
			Instructions: openai.String("You are brief."),
			Store:        openai.Bool(false),
			Tools:        []responses.ToolUnionParam{responses.ToolParamOfFunction("get_weather", weather[0].Function.Parameters, false)},
			Input:        responses.ResponseNewParamsInputUnion{OfInputItemList: input},
		}
		r := respond(t, client, params, streamed)
		if len(r.Output) != 1 || r.Output[0].Type != "function_call" {
			t.Fatalf("streamed %v: output %+v", streamed, r.Output)
		}
		call := r.Output[0].AsFunctionCall()
		if call.Name != "get_weather" || call.Arguments != `{"city": "Reykjavík"}` {
			t.Errorf("streamed %v: call %+v", streamed, call)
		}
		asked := call.ToParam()
		params.Input.OfInputItemList = append(input,
			responses.ResponseInputItemUnionParam{OfFunctionCall: &asked},
			responses.ResponseInputItemParamOfFunctionCallOutput(call.CallID, "horizontally"))
		r = respond(t, client, params, streamed)
		if len(strings.Fields(r.OutputText())) != 24 || r.Status != "completed" || r.Usage.OutputTokens != 24 || r.Usage.InputTokensDetails.CachedTokens == 0 {
			t.Errorf("streamed %v: %s", streamed, r.RawJSON())
		}
		said := r.Output[0].AsMessage().ToParam()
		params.Input.OfInputItemList = append(params.Input.OfInputItemList,
			responses.ResponseInputItemUnionParam{OfOutputMessage: &said},
			responses.ResponseInputItemParamOfMessage("And tomorrow?", "user"))
		params.Tools = nil
		if r = respond(t, client, params, streamed); len(strings.Fields(r.OutputText())) != 24 {
			t.Errorf("streamed %v: %s", streamed, r.RawJSON())
		}
		s.booksAtZero(t)
	}
}

// Requests that an error of the router's own is the answer to.
var (
	askWay = openai.ChatCompletionNewParams{Model: "canned", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Which way?")}}
	textOf = openai.CompletionNewParams{Model: "canned", Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Once")}}
	talkOf = responses.ResponseNewParams{Model: "canned", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("Which way?")}}
	embeds = openai.EmbeddingNewParams{Model: "canned", Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("by the sea")}}
)

// oneEngine starts an engine, Caddy and the client before it.
func oneEngine(t *testing.T) (openai.Client, *server, *canned.Engine) {
	t.Helper()
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines))
	return openai.NewClient(option.WithBaseURL(s.url+"/v1/"), option.WithAPIKey("sk-none"), option.WithMaxRetries(0)), s, engines[0]
}

func TestOpenAIClientUnderstandsOurErrors(t *testing.T) {
	client, s, engine := oneEngine(t)
	want := func(err error, status int, code string) {
		t.Helper()
		var apiErr *openai.Error
		if !errors.As(err, &apiErr) || apiErr.StatusCode != status || apiErr.Code != code || apiErr.Message == "" {
			t.Errorf("got the error %v, want status %d and the code %s", err, status, code)
		}
	}
	nvext := option.WithJSONSet("nvext", json.RawMessage("5"))
	_, err := client.Chat.Completions.New(t.Context(), askWay, nvext)
	want(err, http.StatusBadRequest, "invalid_nvext")
	_, err = client.Responses.New(t.Context(), talkOf, nvext)
	want(err, http.StatusBadRequest, "invalid_nvext")
	engine.Kill()
	_, err = client.Chat.Completions.New(t.Context(), askWay)
	want(err, http.StatusServiceUnavailable, "no_worker")
	_, err = client.Responses.New(t.Context(), talkOf)
	want(err, http.StatusServiceUnavailable, "no_worker")
	_, err = client.Embeddings.New(t.Context(), embeds)
	want(err, http.StatusServiceUnavailable, "no_worker")
	s.booksAtZero(t)
}

// TestOpenAIClientSeesWhyAStreamBroke has an engine that dies between two events. OpenAI's
// client takes an extra empty line for an event, and would fail before it reads the error
// event.
func TestOpenAIClientSeesWhyAStreamBroke(t *testing.T) {
	client, s, engine := oneEngine(t)
	engine.SetFault(canned.Fault{Kind: canned.DieMidStream, Words: 5})
	for name, err := range map[string]error{
		"chat":        drained(client.Chat.Completions.NewStreaming(t.Context(), askWay)),
		"completions": drained(client.Completions.NewStreaming(t.Context(), textOf)),
		"responses":   drained(client.Responses.NewStreaming(t.Context(), talkOf)),
	} {
		if err == nil || !strings.Contains(err.Error(), "stream_broken") {
			t.Errorf("%s: the broken stream ends with the error %v", name, err)
		}
	}
	s.booksAtZero(t)
}

// drained reads a stream to its end and returns the error there.
func drained[T any](events *ssestream.Stream[T]) error {
	defer events.Close()
	for events.Next() {
		continue
	}
	return events.Err()
}
