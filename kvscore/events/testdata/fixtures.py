"""Writes fixtures.txt: event batches of engines' versions, in hex, by an encoder that is not ours.

    pip install msgpack && python fixtures.py > fixtures.txt
"""

import struct

import msgpack

H1, H2, H3, PARENT = 0xDFAA000000000001, 0x1122334455667788, 0xE4521B066D9F753E, 0x658532825EB08338
TS = 1789095808.75
TOKENS = [1, 200, 70000, 4] * 2  # two blocks of 4
FULL = "full_attention"
IMAGE, DIGEST = "a1" * 32, bytes(range(32))


def signed(h):
    return h - (1 << 64) if h >= 1 << 63 else h


def stored(**other):
    """A map event of vLLM since 0.24, as msgspec writes it."""
    e = dict(type="BlockStored", block_hashes=[H1, H2], parent_block_hash=PARENT, token_ids=TOKENS, block_size=4,
             lora_id=None, medium="GPU", lora_name=None)
    e.update(other)
    return e


def batch(*events, rank=0):
    return [TS, list(events), rank]


def narrow(v, code, fmt):
    """An integer with a width of our choice, to be put into an array by hand."""
    return bytes([code]) + struct.pack(fmt, v)


def by_hand(*hashes):
    """A BlockRemoved whose hashes are already encoded."""
    pack = msgpack.packb
    event = b"\x93" + pack("BlockRemoved") + bytes([0x90 + len(hashes)]) + b"".join(hashes) + pack("GPU")
    return b"\x93" + pack(TS) + b"\x91" + event + pack(0)


fixtures = {
    # vLLM, events as arrays
    "vllm-0.9": [TS, [["BlockStored", [H1, H2], PARENT, TOKENS, 4, None], ["BlockRemoved", [H3]], ["AllBlocksCleared"]]],
    "vllm-0.9-lora-id": [TS, [["BlockStored", [H1, H2], None, TOKENS, 4, 7]]],
    "vllm-0.11": batch(["BlockStored", [H1, H2], PARENT, TOKENS, 4, None, "GPU"], ["BlockRemoved", [H3], "CPU"], rank=3),
    "vllm-0.19": batch(["BlockStored", [H1, H2], None, TOKENS, 4, 2, "GPU", "ad1",
                        [["ad1", [IMAGE, 2], "salt"], ["ad1", [IMAGE, -2], DIGEST]], 0],
                       ["BlockRemoved", [H3], "GPU", 0]),
    "vllm-0.17-media": batch(["BlockStored", [H1, H2], None, TOKENS, 4, None, "GPU", None, [["salt"], [IMAGE]]]),
    "vllm-0.23": batch(["BlockStored", [H1, H2], None, TOKENS, 4, None, "CPU", None, [None, None], 1, FULL, None, "LOCAL", "kvcr"],
                       ["BlockStored", [H3], None, TOKENS[:4], 4, None, "GPU", None, [None], 0, "sliding_window", 4096, "LOCAL", None],
                       ["BlockRemoved", [H3], "GPU", 0],
                       ["BlockRemoved", [H1], "GPU", 1],
                       ["BlockRemoved", [H2], "GPU", 1, FULL, None, "REMOTE", None],
                       ["AllBlocksCleared", "kvcr"]),
    # vLLM, events as maps
    "vllm-0.26": batch(stored(extra_keys=[None, None], group_idx=0, kv_cache_spec_kind=FULL)),
    "vllm-bytes": batch(stored(block_hashes=[DIGEST, DIGEST[::-1]], parent_block_hash=b"\x01" * 32)),
    "vllm-offload": batch(dict(type="BlockStored", block_hashes=[H1, H2], parent_block_hash=None, token_ids=[], block_size=0,
                               lora_id=None, medium="CPU", lora_name=None)),
    "vllm-maps": {"ts": TS, "events": [stored(), {"type": "AllBlocksCleared"}], "data_parallel_rank": 5},
    "salt-hex": batch(stored(parent_block_hash=None, extra_keys=[[IMAGE], None])),
    "salt-adapter": batch(stored(parent_block_hash=None, lora_name="ad1", extra_keys=[["ad1", "ad1"], ["ad1"]])),
    "lora-keys": batch(stored(lora_id=1, lora_name="ad1", extra_keys=[["ad1"], ["ad1"]])),
    # SGLang
    "sglang-0.5.3": [TS, [["BlockStored", [signed(H1), H2], signed(H3), TOKENS, 4, None], ["BlockRemoved", [signed(H1)]]]],
    "sglang-0.5.18": batch(["BlockStored", [signed(H1), H2], None, TOKENS, 4, None, "CPU_PINNED", {"cache_salt": "s1", "session_id": "chat-7"}], rank=1),
    "sglang-0.5.21": batch(dict(type="BlockStored", block_hashes=[signed(H1), signed(H2), signed(H3)], parent_block_hash=signed(PARENT),
                                token_ids=[5, 151643, 7], block_size=1, lora_id=None, medium="GPU", cache_salt="s1", session_id="chat-7"),
                           {"type": "BlockRemoved", "block_hashes": [signed(H1)], "medium": "DISK"}),
    "sglang-eagle": batch(dict(type="BlockStored", block_hashes=[H1, H2], parent_block_hash=None,
                               token_ids=[[1, 2], [2, 70000], [70000, 4], [4, 5]], block_size=2, lora_id=None, medium="GPU")),
    # TensorRT-LLM
    "trtllm": batch(dict(type="BlockStored", block_hashes=[H1, H2], parent_block_hash=None, token_ids=TOKENS, block_size=4, lora_id=0),
                    dict(type="BlockRemoved", block_hashes=[H2])),
    # what made other decoders lose a batch
    "unknown-tag": batch(["BlockMoved", [H1]], {"type": "BlockMoved", "block_hashes": [H1]}, stored()),
    "int-widths": by_hand(b"\x05", b"\xff", narrow(-7, 0xD0, ">b"), narrow(-300, 0xD1, ">h"), narrow(-70000, 0xD2, ">i"),
                          narrow(-5, 0xD3, ">q"), narrow(9, 0xCC, ">B"), narrow(9, 0xCD, ">H"), narrow(9, 0xCE, ">I"), narrow(9, 0xCF, ">Q")),
    "more-elements": batch(["BlockStored", [H1, H2], None, TOKENS, 4, None, "GPU", None, None, 0, FULL, None, "LOCAL", None, {"a": [1]}, "x"],
                           ["BlockRemoved", [H3], "GPU", 0, FULL, None, "LOCAL", None, 9, [1, 2]]) + [{"more": [1, {2: 3}]}, 7],
    "more-keys": {"v": 2, "events": [stored(new={"a": [None, {"b": 1}]}, newer=[1.5, True, msgpack.ExtType(3, b"xyz")]) | {7: 8}], "ts": 5, "dp_rank": 2},
}

if __name__ == "__main__":
    for name, value in fixtures.items():
        payload = value if isinstance(value, bytes) else msgpack.packb(value)
        print(name, payload.hex())
