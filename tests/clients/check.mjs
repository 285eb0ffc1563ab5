// Drives kv_router with OpenAI's and Anthropic's own Node clients, unchanged.
//
// usage: node check.mjs <kv_router> <engine>
//
// Both are URLs without a path. Each check is made through kv_router and at one
// of its engines, and must come to the same. Below kv_router's URL, /broken has
// an engine that dies after five words of a stream, /down has none, and /full
// has one that is full, and refuses what would be late.
import assert from 'node:assert/strict'
import Anthropic from '@anthropic-ai/sdk'
import { VERSION as anthropicVersion } from '@anthropic-ai/sdk/version'
import OpenAI from 'openai'
import { VERSION as openaiVersion } from 'openai/version'

const [router, engine] = process.argv.slice(2)
const model = 'canned'
const pixel =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='
const dataURL = 'data:image/png;base64,' + pixel
const city = { city: 'Reykjavík' }
const schema = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
const tool = { name: 'get_weather', description: 'The weather of a city.' }
const chatTools = [{ type: 'function', function: { ...tool, parameters: schema } }]
const responseTools = [{ type: 'function', ...tool, parameters: schema, strict: false }]
const messageTools = [{ ...tool, input_schema: schema }]
const question = [
  { role: 'system', content: 'You are brief.' },
  { role: 'user', content: 'Which way to the harbour?' },
]

const words = (text) => {
  assert.equal(text.split(/\s+/).filter(Boolean).length, 24, text)
  return text
}

const all = async (stream) => {
  const out = []
  for await (const x of stream) out.push(x)
  return out
}

const openaiChecks = {
  async chat(c) {
    const messages = [...question]
    const first = await c.chat.completions.create({ model, messages })
    words(first.choices[0].message.content)
    assert.equal(first.usage.completion_tokens, 24)
    messages.push(first.choices[0].message, { role: 'user', content: 'And back?' })
    const second = await c.chat.completions.create({ model, messages })
    words(second.choices[0].message.content)
    return [first, second]
  },

  async chatStreamed(c) {
    const out = []
    for (const asked of [false, true]) {
      const options = asked ? { stream_options: { include_usage: true } } : {}
      const chunks = await all(
        await c.chat.completions.create({ model, messages: question, stream: true, ...options }),
      )
      words(chunks.map((x) => x.choices[0]?.delta.content ?? '').join(''))
      assert.equal(chunks.filter((x) => x.usage).length, asked ? 1 : 0)
      assert.equal(chunks.filter((x) => x.choices.length === 0).length, asked ? 1 : 0)
      out.push(chunks)
    }
    return out
  },

  async chatTools(c) {
    const messages = [{ role: 'user', content: 'Is it raining?' }]
    const first = await c.chat.completions.create({ model, messages, tools: chatTools })
    const call = first.choices[0].message.tool_calls[0]
    assert.equal(call.function.name, 'get_weather')
    assert.deepEqual(JSON.parse(call.function.arguments), city)
    const final = await c.chat.completions
      .stream({ model, messages, tools: chatTools })
      .finalChatCompletion()
    const streamed = final.choices[0].message.tool_calls[0]
    assert.deepEqual(JSON.parse(streamed.function.arguments), city)
    messages.push(first.choices[0].message)
    messages.push({ role: 'tool', tool_call_id: call.id, content: 'horizontally' })
    const second = await c.chat.completions.create({ model, messages, tools: chatTools })
    words(second.choices[0].message.content)
    return [first, final, second]
  },

  async chatImage(c) {
    const content = [
      { type: 'text', text: 'What is this?' },
      { type: 'image_url', image_url: { url: dataURL, detail: 'low' } },
    ]
    const r = await c.chat.completions.create({ model, messages: [{ role: 'user', content }] })
    words(r.choices[0].message.content)
    return r
  },

  async completions(c) {
    const out = []
    for (const prompt of ['Once upon a time', [1, 5, 9, 1200]]) {
      const r = await c.completions.create({ model, prompt })
      words(r.choices[0].text)
      const chunks = await all(await c.completions.create({ model, prompt, stream: true }))
      words(chunks.map((x) => x.choices[0].text).join(''))
      out.push(r, chunks)
    }
    return out
  },

  async responses(c) {
    const common = { model, instructions: 'Be brief.', store: false }
    const first = await c.responses.create({ ...common, input: 'Which way?' })
    words(first.output_text)
    assert.equal(first.usage.output_tokens, 24)
    const input = [
      { role: 'user', content: 'Which way?' },
      ...first.output,
      { role: 'user', content: 'And back?' },
    ]
    const second = await c.responses.create({ ...common, input })
    words(second.output_text)
    return [first, second]
  },

  async responsesStreamed(c) {
    const asked = { model, input: 'Which way?', store: false }
    const events = await all(await c.responses.create({ ...asked, stream: true }))
    const deltas = events.filter((x) => x.type === 'response.output_text.delta')
    words(deltas.map((x) => x.delta).join(''))
    assert.equal(events.at(-1).type, 'response.completed')
    const final = await c.responses.stream(asked).finalResponse()
    words(final.output_text)
    return [events, final]
  },

  async responsesTools(c) {
    const input = [{ role: 'user', content: 'Is it raining?' }]
    const common = { model, tools: responseTools, store: false }
    const first = await c.responses.create({ ...common, input })
    const call = first.output[0]
    assert.equal(call.type, 'function_call')
    assert.deepEqual(JSON.parse(call.arguments), city)
    const final = await c.responses.stream({ ...common, input }).finalResponse()
    assert.deepEqual(JSON.parse(final.output[0].arguments), city)
    input.push(call, { type: 'function_call_output', call_id: call.call_id, output: 'horizontally' })
    const second = await c.responses.create({ ...common, input })
    words(second.output_text)
    return [first, final, second]
  },

  async responsesImage(c) {
    const content = [
      { type: 'input_text', text: 'What is this?' },
      { type: 'input_image', image_url: dataURL, detail: 'auto' },
    ]
    const r = await c.responses.create({ model, input: [{ role: 'user', content }], store: false })
    words(r.output_text)
    return r
  },

  async embeddings(c) {
    // The client asks for base64 unless told, and decodes it.
    const input = ['by the sea', 'in the hills']
    const packed = await c.embeddings.create({ model, input })
    const plain = await c.embeddings.create({ model, input, encoding_format: 'float', dimensions: 16 })
    assert.deepEqual(
      packed.data.map((x) => Array.from(x.embedding)),
      plain.data.map((x) => x.embedding),
    )
    assert.equal(plain.data[1].embedding.length, 16)
    return [packed, plain, await c.embeddings.create({ model, input: [1, 2, 3] })]
  },

  async models(c) {
    const listed = await all(c.models.list())
    assert.deepEqual(listed.map((m) => m.id), [model])
    return listed
  },
}

const anthropicChecks = {
  async messages(c) {
    const messages = [{ role: 'user', content: 'Which way?' }]
    const common = { model, max_tokens: 100, system: 'Be brief.' }
    const first = await c.messages.create({ ...common, messages })
    words(first.content[0].text)
    assert.equal(first.usage.output_tokens, 24)
    messages.push({ role: 'assistant', content: first.content }, { role: 'user', content: 'And back?' })
    const second = await c.messages.create({ ...common, messages })
    words(second.content[0].text)
    const count = await c.messages.countTokens({ model, messages })
    assert.ok(count.input_tokens > 0)
    return [first, second, count]
  },

  async messagesStreamed(c) {
    const asked = { model, max_tokens: 100, messages: [{ role: 'user', content: 'Which way?' }] }
    const events = await all(await c.messages.create({ ...asked, stream: true }))
    const deltas = events.filter((x) => x.type === 'content_block_delta')
    words(deltas.map((x) => x.delta.text).join(''))
    assert.equal(events.at(-1).type, 'message_stop')
    const final = await c.messages.stream(asked).finalMessage()
    words(final.content[0].text)
    assert.ok(final.usage.cache_read_input_tokens > 0)
    return [events, final]
  },

  async messagesTools(c) {
    const messages = [{ role: 'user', content: 'Is it raining?' }]
    const common = { model, max_tokens: 100, tools: messageTools }
    const first = await c.messages.create({ ...common, messages })
    const call = first.content[0]
    assert.equal(call.name, 'get_weather')
    assert.deepEqual(call.input, city)
    const final = await c.messages.stream({ ...common, messages }).finalMessage()
    assert.deepEqual(final.content[0].input, city)
    assert.equal(final.stop_reason, 'tool_use')
    messages.push({ role: 'assistant', content: first.content })
    messages.push({
      role: 'user',
      content: [{ type: 'tool_result', tool_use_id: call.id, content: 'horizontally' }],
    })
    const second = await c.messages.create({ ...common, messages })
    words(second.content[0].text)
    return [first, final, second]
  },

  async messagesImage(c) {
    const source = { type: 'base64', media_type: 'image/png', data: pixel }
    const content = [{ type: 'image', source }, { type: 'text', text: 'What is this?' }]
    const r = await c.messages.create({ model, max_tokens: 100, messages: [{ role: 'user', content }] })
    words(r.content[0].text)
    return r
  },
}

const openaiAt = (url) =>
  new OpenAI({ baseURL: url + '/v1', apiKey: 'sk-none', maxRetries: 0, timeout: 20_000 })
const anthropicAt = (url) =>
  new Anthropic({ baseURL: url, apiKey: 'sk-none', maxRetries: 0, timeout: 20_000 })

// refused wants an error of the router's own.
async function refused(call, kind, status, code) {
  await assert.rejects(call, (e) => {
    assert.ok(e instanceof kind, String(e))
    const body = e.error.error ?? e.error
    assert.deepEqual([e.status, body.code], [status, code])
    assert.ok(e.message.includes(body.message), e.message)
    return true
  })
}

// broken wants a stream that ends in an error, behind what had come.
async function broken(call, kind, code = 'stream_broken', least = 5) {
  let seen = 0
  await assert.rejects(
    async () => {
      for await (const _ of await call()) seen++
    },
    (e) => {
      assert.ok(e instanceof kind, String(e))
      assert.equal((e.error.error ?? e.error).code, code)
      return true
    },
  )
  assert.ok(seen >= least, `only ${seen} events came before the error`)
}

async function openaiErrors() {
  const ask = { model, messages: question }
  const talk = { model, input: 'Which way?' }
  let c = openaiAt(router)
  await refused(() => c.chat.completions.create({ ...ask, nvext: 5 }), OpenAI.BadRequestError, 400, 'invalid_nvext')
  await refused(() => c.responses.create({ ...talk, nvext: 5 }), OpenAI.BadRequestError, 400, 'invalid_nvext')
  c = openaiAt(router + '/down')
  const none = [OpenAI.InternalServerError, 503, 'no_worker']
  await refused(() => c.chat.completions.create(ask), ...none)
  await refused(() => c.responses.create({ ...talk, stream: true }), ...none)
  await refused(() => c.embeddings.create(talk), ...none)
  c = openaiAt(router + '/full')
  await refused(() => c.chat.completions.create(ask), OpenAI.RateLimitError, 429, 'ttft_unattainable')
  await refused(() => c.responses.create({ ...talk, stream: true }), OpenAI.RateLimitError, 429, 'ttft_unattainable')
  c = openaiAt(router + '/broken')
  await broken(() => c.chat.completions.create({ ...ask, stream: true }), OpenAI.APIError)
  await broken(() => c.completions.create({ model, prompt: 'Once', stream: true }), OpenAI.APIError)
  await broken(() => c.responses.create({ ...talk, stream: true }), OpenAI.APIError)
  c = openaiAt(router + '/late')
  const late = [OpenAI.APIError, 'late', 0]
  await broken(() => c.chat.completions.create({ ...ask, stream: true }), ...late)
  await broken(() => c.completions.create({ model, prompt: 'Once', stream: true }), ...late)
  await broken(() => c.responses.create({ ...talk, stream: true }), ...late)
}

async function anthropicErrors() {
  const ask = { model, max_tokens: 100, messages: question.slice(1) }
  let c = anthropicAt(router)
  await refused(() => c.messages.create({ ...ask, nvext: 5 }), Anthropic.BadRequestError, 400, 'invalid_nvext')
  c = anthropicAt(router + '/down')
  await refused(() => c.messages.create(ask), Anthropic.APIError, 503, 'no_worker')
  await refused(() => c.messages.create({ ...ask, stream: true }), Anthropic.APIError, 503, 'no_worker')
  c = anthropicAt(router + '/full')
  await refused(() => c.messages.create({ ...ask, stream: true }), Anthropic.RateLimitError, 429, 'ttft_unattainable')
  c = anthropicAt(router + '/broken')
  await broken(() => c.messages.create({ ...ask, stream: true }), Anthropic.APIError)
  c = anthropicAt(router + '/late')
  await broken(() => c.messages.create({ ...ask, stream: true }), Anthropic.APIError, 'late', 0)
}

console.log(`node ${process.version}, openai ${openaiVersion}, @anthropic-ai/sdk ${anthropicVersion}`)
const plain = (x) => JSON.parse(JSON.stringify(x))
for (const [checks, at] of [[openaiChecks, openaiAt], [anthropicChecks, anthropicAt]]) {
  for (const [name, check] of Object.entries(checks)) {
    console.log(name)
    assert.deepEqual(plain(await check(at(router))), plain(await check(at(engine))))
  }
}
for (const check of [openaiErrors, anthropicErrors]) {
  console.log(check.name)
  await check()
}
console.log('all good')
