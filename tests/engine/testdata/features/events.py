"""Writes request.json and events.txt: a prompt with three media items, and the KV events of its blocks.

    python events.py

vLLM 0.32 must be installed. It computes the extra keys and encodes the events; no engine runs.
"""

import json
from types import SimpleNamespace as Namespace

import msgspec
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

SIZE = 4
IDS = [*range(100, 106), *[7] * 7, 106, 107, *[7] * 3, *[7] * 5, *range(108, 115)]
ITEMS = [("image", "a" * 64, 6, 7), ("image", "b" * 64, 15, 3), ("audio", 'clip "é"', 18, 5)]


def batch(salt=None, adapter=None, tower=False):
    """tower is vLLM's option enable_tower_connector_lora."""
    request = Namespace(
        mm_features=[Namespace(identifier=f"{adapter}:{name}" if tower else name, mm_position=Namespace(offset=at, length=n))
                     for _, name, at, n in ITEMS],
        lora_request=adapter and Namespace(lora_name=adapter, lora_path="/adapters"), cache_salt=salt, prompt_embeds=None)
    keys, item, blocks = [], 0, len(IDS) // SIZE
    for block in range(blocks):
        key, item = generate_block_hash_extra_keys(request, block * SIZE, (block + 1) * SIZE, item)
        keys.append(key)
    event = BlockStored(
        block_hashes=list(range(1, blocks + 1)), parent_block_hash=None, token_ids=IDS[:blocks * SIZE], block_size=SIZE,
        lora_id=adapter and 1, medium="GPU", lora_name=adapter, extra_keys=to_event_extra_keys(keys))
    return msgspec.msgpack.encode(KVEventBatch(ts=1789095808.75, events=[event], data_parallel_rank=0))


hashes, places = {}, {}
for modality, name, at, n in ITEMS:
    hashes.setdefault(modality, []).append(name)
    places.setdefault(modality, []).append({"offset": at, "length": n})
with open("request.json", "w") as f:
    f.write(json.dumps({"token_ids": IDS, "features": {"mm_hashes": hashes, "mm_placeholders": places, "kwargs_data": None}}) + "\n")
with open("events.txt", "w") as f:
    for line, options in {"plain": {}, "salt": {"salt": "s"}, "adapter": {"adapter": "ad"}, "tower": {"adapter": "ad", "tower": True}}.items():
        f.write(f"{line} {batch(**options).hex()}\n")
