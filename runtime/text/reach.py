"""How much text one token can stand for at most: what is far too long is known without encoding it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .pieces import BYTE_OF_CHARACTER

__all__ = ["Reach"]

#: By normaliser: most characters of which it makes one. A character has at most 4 in its canonical decomposition.
_NORMALIZERS = {"NFC": 4, "NFD": 1, "Prepend": 1}
#: Cut the text, or write it otherwise, and leave nothing out.
_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """characters: most of a text that one token stands for. silent: characters that may come to no token at all."""

    characters: int
    silent: str = ""

    def least_tokens(self, text: str) -> int:
        """A text has at least so many tokens, special ones around it aside."""
        spelled = len(text) - sum(map(text.count, self.silent))
        return -(-spelled // self.characters)

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Reach | None:
        """The reach of a tokenizer, by the content of its tokenizer.json.

        None where there is none, or where it is not known: a normaliser, pre-tokenizer or added token that leaves out
        characters, or a vocabulary that does not spell them all, so that any number becomes one unknown token.
        """
        model, added = description["model"], description.get("added_tokens") or []
        vocabulary = model.get("vocab")
        if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
            return None
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return None
        if any(token.get("lstrip") or token.get("rstrip") for token in added):
            return None
        stages = _stages(description.get("normalizer"), "normalizers")
        cuts = _stages(description.get("pre_tokenizer"), "pretokenizers")
        shrinkage = _shrinkage(stages)
        silent = _silent(vocabulary, cuts, has_bytes=bool(model.get("byte_fallback")))
        if shrinkage is None or silent is None or (silent and stages):
            return None
        longest = max(map(len, [*vocabulary, *(token["content"] for token in added)]))
        return cls(characters=shrinkage * longest, silent=silent)


def _shrinkage(stages: Sequence[Mapping[str, Any]]) -> int | None:
    """Most characters of which the normalisers make one; None when there is no such number."""
    factors = [1 if _only_lengthens(stage) else _NORMALIZERS.get(stage["type"]) for stage in stages]
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


def _silent(vocabulary: Mapping[str, int], cuts: Sequence[Mapping[str, Any]], *, has_bytes: bool) -> str | None:
    """The characters for which there may be no token; None when they are too many to name."""
    if any(cut["type"] not in _PRE_TOKENIZERS or cut.get("behavior") == "Removed" for cut in cuts):
        return None
    if any(cut["type"] == "ByteLevel" for cut in cuts):
        # Characters beyond ASCII hold a byte from 0x80 to 0xbf; of bytes no text has, vocabularies lack most.
        missing = sorted(byte for character, byte in BYTE_OF_CHARACTER.items() if character not in vocabulary)
        return None if any(0x80 <= byte < 0xC0 for byte in missing) else "".join(chr(b) for b in missing if b < 0x80)
    return "" if has_bytes and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) else None


def _stages(stage: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The stages of a sequence, nested ones too."""
    if stage is None:
        return []
    if stage["type"] != "Sequence":
        return [stage]
    return [each for part in stage[name] for each in _stages(part, name)]


def _only_lengthens(stage: Mapping[str, Any]) -> bool:
    """Whether a normaliser replaces a string by one at least as long."""
    pattern = stage.get("pattern") or {}
    return stage["type"] == "Replace" and 0 < len(pattern.get("String", "")) <= len(stage["content"])
