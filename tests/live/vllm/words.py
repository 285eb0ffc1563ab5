"""A vLLM logits processor that lets a model without weights say whole words only.

A random model generates bytes that are no text. A client cannot send them back
as it got them, so the next turn's prompt would have other tokens than the
answer. A word of one token comes back as that token.
"""

import re

import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor


class Words(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        words = re.compile(r"\u0120[a-z]{2,}")
        self.banned = torch.tensor(
            [not words.fullmatch(t or "") for t in tokenizer.convert_ids_to_tokens(range(vllm_config.model_config.get_vocab_size()))],
            device=device,
        )

    def apply(self, logits):
        return logits.masked_fill_(self.banned, float("-inf"))

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass
