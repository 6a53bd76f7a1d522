"""Writes `genai_config.json`, by which onnxruntime-genai's engine runs a model converted for stock onnxruntime CUDA."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagegraft.custom_ops import manifest as names

__all__ = ["CONFIG_FILE", "write_genai_config"]

CONFIG_FILE = "genai_config.json"


def write_genai_config(
    folder: Path, manifest: names.Manifest, config: Mapping[str, Any], *, heads: int, hidden_size: int
) -> None:
    """Writes the file into `folder`. `config` is the source's config.json (token ids and type come from it)."""
    inputs = {
        name: name
        for name in (names.INPUT_IDS, names.CUMULATIVE, names.PAST, "attention_metadata", names.LOGITS_INDICES)
    }
    for group in manifest.groups:
        inputs[group.block_table] = group.block_table
    layer = manifest.layers[0]
    length = manifest.max_positions or 2048
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": [{"cuda": {}}]},
        "filename": manifest.model_file,
        "head_size": layer.key_head_size,
        "hidden_size": hidden_size,
        "inputs": {
            **inputs,
            "past_key_names": names.cache_name(0, "key").replace(".0.", ".%d."),
            "past_value_names": names.cache_name(0, "value").replace(".0.", ".%d."),
        },
        "outputs": {
            "logits": names.LOGITS,
            "present_key_names": names.cache_name(0, "key", present=True).replace(".0.", ".%d."),
            "present_value_names": names.cache_name(0, "value", present=True).replace(".0.", ".%d."),
        },
        "num_attention_heads": heads,
        "num_hidden_layers": len(manifest.layers),
        "num_key_value_heads": layer.kv_heads,
        "state_groups": [_state_group(group) for group in manifest.groups],
    }
    model = {
        "vocab_size": manifest.vocab_size,
        "context_length": length,
        **({"type": config["model_type"]} if "model_type" in config else {}),
        **{key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None},
        "decoder": decoder,
    }
    content = {
        "model": model,
        "search": {"max_length": length, "past_present_share_buffer": True},
        "engine": {"dynamic_batching": {"block_size": 256, "max_batch_size": 100, "gpu_utilization_factor": 0.6}},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def _state_group(group: names.CacheGroup) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": "paged_kv", "layer_ids": list(group.layers)}
    if group.window is not None:
        found["window"] = group.window
    return found
