"""Texts to measure and to calibrate cache types with, and how they become token ids.

`evaluation.txt` and `calibration.txt` were written for this purpose and share no passage: static scales are never
measured on what they were taken from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pagegraft.custom_ops.files import read_text

from ..errors import KvCacheError

__all__ = ["TokenText", "bundled_text", "file_text"]

#: Random tokens in the place of a bundled text when the model has no tokenizer.
RANDOM_TOKENS = {"evaluation": 1024, "calibration": 1024}
#: A tokenizer that gives a text fewer different tokens than this does not know its language.
LEAST_DISTINCT = 64
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TokenText:
    """Token ids and a few words on where they come from."""

    origin: str
    tokens: tuple[int, ...]


def bundled_text(name: str, folder: Path, vocab: int) -> TokenText:
    """The bundled "evaluation" or "calibration" text in the tokens of the model in `folder`.

    A model without tokenizer.json, or with one that knows next to nothing of the text, gets uniformly random tokens;
    they say little about its perplexity. Raises KvCacheError for a tokenizer that cannot be used.
    """
    reason = f"the model has no {_TOKENIZER}"
    if (folder / _TOKENIZER).is_file():
        text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")
        tokens = _encode(text, folder, vocab)
        if len(set(tokens)) >= LEAST_DISTINCT:
            return TokenText(f"the bundled {name} text", tokens)
        reason = f"{_TOKENIZER} turns the bundled text into {len(set(tokens))} different tokens"
    rng = np.random.default_rng({"evaluation": 11, "calibration": 12}[name])
    drawn = tuple(int(t) for t in rng.integers(0, vocab, RANDOM_TOKENS[name]))
    return TokenText(f"random tokens ({reason})", drawn)


def file_text(path: Path, folder: Path, vocab: int) -> TokenText:
    """The text of a file in the tokens of the model in `folder`.

    Raises KvCacheError for a file that is not text or too short, and for a model without tokenizer.json.
    """
    text = read_text(path, KvCacheError, "give a plain text file")
    if not (folder / _TOKENIZER).is_file():
        raise KvCacheError(f"{folder} has no {_TOKENIZER}, so no text can be given to it; put the file there")
    tokens = _encode(text, folder, vocab)
    if len(set(tokens)) < LEAST_DISTINCT:
        raise KvCacheError(
            f"{path} has {len(set(tokens))} different tokens of this model, which says too little of its caches; give "
            "a text of at least some hundred words in a language of the model"
        )
    return TokenText(path.name, tokens)


def _encode(text: str, folder: Path, vocab: int) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    try:
        ids = Tokenizer.from_file(str(folder / _TOKENIZER)).encode(text).ids
    except Exception as error:  # tokenizers raises untyped exceptions
        raise KvCacheError(f"{folder / _TOKENIZER} cannot be used ({error}); replace it by the model's own") from None
    if ids and max(ids) >= vocab:
        raise KvCacheError(
            f"{folder / _TOKENIZER} gives token {max(ids)}, the model has {vocab}; replace it by the model's own"
        )
    return tuple(ids)
