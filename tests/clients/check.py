"""Drives kv_router with OpenAI's and Anthropic's own Python clients, unchanged.

usage: check.py <kv_router> <engine>

Both are URLs without a path. Each check is made through kv_router and at one
of its engines, and must come to the same. Below kv_router's URL, /broken has
an engine that dies after five words of a stream, /down has none, and /full
has one that is full, and refuses what would be late.
"""

import asyncio
import json
import sys

import anthropic
import openai

ROUTER, ENGINE = sys.argv[1], sys.argv[2]
MODEL = "canned"
WORDS = 24
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DATA_URL = "data:image/png;base64," + PIXEL
CITY = {"city": "Reykjavík"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather of a city."}
CHAT_TOOLS = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
RESPONSE_TOOLS = [{"type": "function", **TOOL, "parameters": SCHEMA, "strict": False}]
MESSAGE_TOOLS = [{**TOOL, "input_schema": SCHEMA}]
QUESTION = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Which way to the harbour?"},
]


def same(got, want):
    assert got == want, f"got {got!r}, want {want!r}"


def words(text):
    same(len(text.split()), WORDS)
    return text


# OpenAI


def chat(c):
    messages = list(QUESTION)
    first = c.chat.completions.create(model=MODEL, messages=messages)
    words(first.choices[0].message.content)
    same(first.usage.completion_tokens, WORDS)
    messages += [first.choices[0].message, {"role": "user", "content": "And back?"}]
    second = c.chat.completions.create(model=MODEL, messages=messages)
    words(second.choices[0].message.content)
    return [first.model_dump(), second.model_dump()]


def chat_streamed(c):
    out = []
    for asked in (False, True):
        options = {"stream_options": {"include_usage": True}} if asked else {}
        stream = c.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, **options)
        chunks = list(stream)
        words("".join(x.choices[0].delta.content or "" for x in chunks if x.choices))
        same(len([x for x in chunks if x.usage]), int(asked))
        same(len([x for x in chunks if not x.choices]), int(asked))
        out += [x.model_dump() for x in chunks]
    return out


def chat_tools(c):
    messages = [{"role": "user", "content": "Is it raining?"}]
    first = c.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
    call = first.choices[0].message.tool_calls[0]
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", CITY))
    messages += [
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "horizontally"},
    ]
    second = c.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
    words(second.choices[0].message.content)
    with c.chat.completions.stream(model=MODEL, messages=messages[:1], tools=CHAT_TOOLS) as stream:
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", CITY))
    same(final.choices[0].finish_reason, "tool_calls")
    return [first.model_dump(), second.model_dump(), final.model_dump()]


def chat_image(c):
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
    ]
    r = c.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
    words(r.choices[0].message.content)
    return r.model_dump()


def completions(c):
    out = []
    for prompt in ("Once upon a time", [1, 5, 9, 1200]):
        r = c.completions.create(model=MODEL, prompt=prompt)
        words(r.choices[0].text)
        chunks = list(c.completions.create(model=MODEL, prompt=prompt, stream=True))
        words("".join(x.choices[0].text for x in chunks))
        out += [r.model_dump(), [x.model_dump() for x in chunks]]
    return out


def responses(c):
    first = c.responses.create(model=MODEL, instructions="Be brief.", input="Which way?", store=False)
    words(first.output_text)
    same((first.status, first.usage.output_tokens), ("completed", WORDS))
    turns = [{"role": "user", "content": "Which way?"}, *first.output]
    turns.append({"role": "user", "content": "And back?"})
    second = c.responses.create(model=MODEL, instructions="Be brief.", input=turns, store=False)
    words(second.output_text)
    return [first.model_dump(), second.model_dump()]


def responses_streamed(c):
    events = list(c.responses.create(model=MODEL, input="Which way?", store=False, stream=True))
    words("".join(x.delta for x in events if x.type == "response.output_text.delta"))
    same([x.sequence_number for x in events], list(range(len(events))))
    with c.responses.stream(model=MODEL, input="Which way?", store=False) as stream:
        final = stream.get_final_response()
    words(final.output_text)
    return [[x.model_dump() for x in events], final.model_dump()]


def responses_tools(c):
    turns = [{"role": "user", "content": "Is it raining?"}]
    first = c.responses.create(model=MODEL, input=turns, tools=RESPONSE_TOOLS, store=False)
    call = first.output[0]
    same((call.type, call.name, json.loads(call.arguments)), ("function_call", "get_weather", CITY))
    with c.responses.stream(model=MODEL, input=turns, tools=RESPONSE_TOOLS, store=False) as stream:
        final = stream.get_final_response()
    same(json.loads(final.output[0].arguments), CITY)
    turns += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "horizontally"}]
    second = c.responses.create(model=MODEL, input=turns, tools=RESPONSE_TOOLS, store=False)
    words(second.output_text)
    return [first.model_dump(), final.model_dump(), second.model_dump()]


def responses_image(c):
    content = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
    ]
    r = c.responses.create(model=MODEL, input=[{"role": "user", "content": content}], store=False)
    words(r.output_text)
    return r.model_dump()


def embeddings(c):
    # The client asks for base64 unless told, and decodes it.
    inputs = ["by the sea", "in the hills"]
    packed = c.embeddings.create(model=MODEL, input=inputs)
    plain = c.embeddings.create(model=MODEL, input=inputs, encoding_format="float", dimensions=16)
    same([list(x.embedding) for x in packed.data], [x.embedding for x in plain.data])
    same([len(x.embedding) for x in packed.data], [16, 16])
    tokens = c.embeddings.create(model=MODEL, input=[1, 2, 3])
    return [packed.model_dump(), plain.model_dump(), tokens.model_dump()]


def models(c):
    listed = list(c.models.list())
    same([m.id for m in listed], [MODEL])
    return [m.model_dump() for m in listed]


# Anthropic


def messages(c):
    turns = [{"role": "user", "content": "Which way?"}]
    first = c.messages.create(model=MODEL, max_tokens=100, system="Be brief.", messages=turns)
    words(first.content[0].text)
    same((first.stop_reason, first.usage.output_tokens), ("end_turn", WORDS))
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And back?"}]
    second = c.messages.create(model=MODEL, max_tokens=100, system="Be brief.", messages=turns)
    words(second.content[0].text)
    count = c.messages.count_tokens(model=MODEL, system="Be brief.", messages=turns)
    assert count.input_tokens > 0
    return [first.model_dump(), second.model_dump(), count.model_dump()]


def messages_streamed(c):
    turns = [{"role": "user", "content": "Which way?"}]
    events = list(c.messages.create(model=MODEL, max_tokens=100, messages=turns, stream=True))
    words("".join(x.delta.text for x in events if x.type == "content_block_delta"))
    same(events[-1].type, "message_stop")
    with c.messages.stream(model=MODEL, max_tokens=100, messages=turns) as stream:
        words("".join(stream.text_stream))
        final = stream.get_final_message()
    assert final.usage.cache_read_input_tokens > 0
    return [[x.model_dump() for x in events], final.model_dump()]


def messages_tools(c):
    turns = [{"role": "user", "content": "Is it raining?"}]
    options = {"model": MODEL, "max_tokens": 100, "tools": MESSAGE_TOOLS}
    first = c.messages.create(messages=turns, **options)
    call = first.content[0]
    same((call.type, call.name, call.input), ("tool_use", "get_weather", CITY))
    with c.messages.stream(messages=turns, **options) as stream:
        final = stream.get_final_message()
    same((final.content[0].input, final.stop_reason), (CITY, "tool_use"))
    turns += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "horizontally"}]},
    ]
    second = c.messages.create(messages=turns, **options)
    words(second.content[0].text)
    return [first.model_dump(), final.model_dump(), second.model_dump()]


def messages_image(c):
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    r = c.messages.create(model=MODEL, max_tokens=100, messages=[{"role": "user", "content": content}])
    words(r.content[0].text)
    return r.model_dump()


# Errors of the router's own, and asynchronous clients


def refused(call, kind, status, code):
    try:
        call()
    except kind as e:
        body = e.body.get("error", e.body)
        same((e.status_code, body["code"]), (status, code))
        assert body["message"] in str(e), str(e)
        return
    raise AssertionError(f"no {kind.__name__} with {code}")


def broken(call, kind, code="stream_broken", least=5):
    seen = 0
    try:
        for _ in call():
            seen += 1
    except kind as e:
        assert seen >= least, f"only {seen} events came before the error"
        body = e.body.get("error", e.body)
        same(body["code"], code)
        assert body["message"] in str(e), str(e)
        return
    raise AssertionError(f"no {kind.__name__} at the end of a broken stream")


def openai_errors():
    ask = {"model": MODEL, "messages": QUESTION}
    talk = {"model": MODEL, "input": "Which way?"}
    c = openai_at(ROUTER)
    wrong = {"extra_body": {"nvext": 5}}
    refused(lambda: c.chat.completions.create(**ask, **wrong), openai.BadRequestError, 400, "invalid_nvext")
    refused(lambda: c.responses.create(**talk, **wrong), openai.BadRequestError, 400, "invalid_nvext")
    c = openai_at(ROUTER + "/down")
    refused(lambda: c.chat.completions.create(**ask), openai.InternalServerError, 503, "no_worker")
    refused(lambda: c.responses.create(**talk, stream=True), openai.InternalServerError, 503, "no_worker")
    refused(lambda: c.embeddings.create(**talk), openai.InternalServerError, 503, "no_worker")
    c = openai_at(ROUTER + "/full")
    refused(lambda: c.chat.completions.create(**ask), openai.RateLimitError, 429, "ttft_unattainable")
    refused(lambda: c.responses.create(**talk, stream=True), openai.RateLimitError, 429, "ttft_unattainable")
    c = openai_at(ROUTER + "/broken")
    broken(lambda: c.chat.completions.create(**ask, stream=True), openai.APIError)
    broken(lambda: c.completions.create(model=MODEL, prompt="Once", stream=True), openai.APIError)
    broken(lambda: c.responses.create(**talk, stream=True), openai.APIError)
    c = openai_at(ROUTER + "/late")
    broken(lambda: c.chat.completions.create(**ask, stream=True), openai.APIError, "late", 0)
    broken(lambda: c.completions.create(model=MODEL, prompt="Once", stream=True), openai.APIError, "late", 0)
    broken(lambda: c.responses.create(**talk, stream=True), openai.APIError, "late", 0)


def anthropic_errors():
    ask = {"model": MODEL, "max_tokens": 100, "messages": QUESTION[1:]}
    c = anthropic_at(ROUTER)
    wrong = {"extra_body": {"nvext": 5}}
    refused(lambda: c.messages.create(**ask, **wrong), anthropic.BadRequestError, 400, "invalid_nvext")
    c = anthropic_at(ROUTER + "/down")
    refused(lambda: c.messages.create(**ask), anthropic.APIStatusError, 503, "no_worker")
    refused(lambda: c.messages.create(**ask, stream=True), anthropic.APIStatusError, 503, "no_worker")
    c = anthropic_at(ROUTER + "/full")
    refused(lambda: c.messages.create(**ask, stream=True), anthropic.RateLimitError, 429, "ttft_unattainable")
    c = anthropic_at(ROUTER + "/broken")
    broken(lambda: c.messages.create(**ask, stream=True), anthropic.APIError)
    c = anthropic_at(ROUTER + "/late")
    broken(lambda: c.messages.create(**ask, stream=True), anthropic.APIError, "late", 0)


async def asynchronous(url):
    ask = {"model": MODEL, "messages": QUESTION[1:]}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="sk-none", max_retries=0) as c:
        text = ""
        async for chunk in await c.chat.completions.create(**ask, stream=True):
            text += chunk.choices[0].delta.content or ""
    async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-none", max_retries=0) as c:
        async with c.messages.stream(**ask, max_tokens=100) as stream:
            message = await stream.get_final_message()
    return [words(text), words(message.content[0].text)]


def openai_at(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="sk-none", max_retries=0, timeout=20)


def anthropic_at(url):
    return anthropic.Anthropic(base_url=url, api_key="sk-none", max_retries=0, timeout=20)


def main():
    print(f"python {sys.version.split()[0]}, openai {openai.__version__}, anthropic {anthropic.__version__}")
    checks = [(f, openai_at) for f in (
        chat, chat_streamed, chat_tools, chat_image, completions,
        responses, responses_streamed, responses_tools, responses_image, embeddings, models,
    )] + [(f, anthropic_at) for f in (messages, messages_streamed, messages_tools, messages_image)]
    for check, at in checks:
        print(check.__name__, flush=True)
        same(check(at(ROUTER)), check(at(ENGINE)))
    print("asynchronous", flush=True)
    same(asyncio.run(asynchronous(ROUTER)), asyncio.run(asynchronous(ENGINE)))
    for check in (openai_errors, anthropic_errors):
        print(check.__name__, flush=True)
        check()
    print("all good")


main()
