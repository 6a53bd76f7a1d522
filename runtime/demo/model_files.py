"""The files beside an exported model: configuration, tokenizer and chat template, in the forms of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .errors import DemoError
from .gguf_model import LlamaShape, Vocabulary

__all__ = ["write_configuration", "write_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4


def write_configuration(folder: Path, shape: LlamaShape, vocabulary: Vocabulary) -> None:
    """Write config.json and generation_config.json."""
    special = {
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_id,
        "pad_token_id": vocabulary.pad_token_id,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.context_length,
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_embeddings,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)


def write_tokenizer(folder: Path, vocabulary: Vocabulary, *, context_length: int) -> None:
    """Write tokenizer.json (byte-level BPE) and tokenizer_config.json with the chat template.

    Raises:
        DemoError: the pre-tokenizer that the file names is none of those known here.
    """
    build_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": vocabulary.bos_token_id,
        "eos_token": vocabulary.eos_token_id,
        "unk_token": vocabulary.unk_token_id,
        "pad_token": vocabulary.pad_token_id,
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        **{name: vocabulary.tokens[token_id] for name, token_id in names.items() if token_id is not None},
        "additional_special_tokens": [vocabulary.tokens[token_id] for token_id in _ids_of_type(vocabulary, _CONTROL)],
    }
    if vocabulary.chat_template is not None:
        config["chat_template"] = vocabulary.chat_template
    _write_json(folder / "tokenizer_config.json", config)


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE over the GGUF's tables; control tokens are special, user-defined ones merely unsplittable."""
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary.pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    for token_id in _ids_of_type(vocabulary, _CONTROL):
        tokenizer.add_special_tokens([AddedToken(vocabulary.tokens[token_id], special=True, normalized=False)])
    for token_id in _ids_of_type(vocabulary, _USER_DEFINED):
        tokenizer.add_tokens([AddedToken(vocabulary.tokens[token_id], normalized=False)])
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("smollm", "starcoder", "refact", "command-r"):  # GPT-2's rule after each digit is a piece of its own
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "gpt-2":
        return byte_level
    raise DemoError(f"pre-tokenizer '{name}' is not supported (smollm, starcoder, gpt-2 are): use another model")


def _ids_of_type(vocabulary: Vocabulary, token_type: int) -> list[int]:
    return [token_id for token_id, kind in enumerate(vocabulary.token_types) if kind == token_type]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
