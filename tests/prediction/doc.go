// Package prediction measures how well kv_router predicts what an engine has
// cached. It holds conversations by each API. It compares the response header
// X-Kv-Predicted-Cached-Tokens with the cached tokens of the engine's usage. It
// starts no router and no engine.
package prediction
