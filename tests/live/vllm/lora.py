"""Writes the folder of a LoRA adapter with random weights for model.py's model.

usage: lora.py FOLDER
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

RANK, HIDDEN, LAYERS = 8, 256, 4

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(1)
weights = {}
for layer in range(LAYERS):
    for name in ("q_proj", "v_proj"):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[at + ".lora_A.weight"] = torch.randn(RANK, HIDDEN) / 16
        weights[at + ".lora_B.weight"] = torch.randn(HIDDEN, RANK) / 16
save_file(weights, folder / "adapter_model.safetensors")
(folder / "adapter_config.json").write_text(json.dumps({
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
}), encoding="utf-8")
