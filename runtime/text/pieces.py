"""What one token contributes to the text, for the decoders that tokenizers come with.

A decoder of the `tokenizers` library maps a whole list of tokens to text. The ones in use are made of stages that look
at one token at a time, save three things: whether the token is the first, runs of byte tokens, and bytes of a
character that is not complete. `read_decoder` sorts a decoder's description into one of the forms below; a detokenizer
then needs no second look at earlier tokens. Anything else is None, for which the caller has a slower way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["BYTE_OF_CHARACTER", "ByteLevelDecoder", "PieceDecoder", "byte_level_bytes", "read_decoder"]

#: One stage: (token, whether it is the first of the text) -> text.
Stage = Callable[[str, bool], str]


@dataclass(frozen=True, slots=True)
class ByteLevelDecoder:
    """Tokens spell bytes; the text is their UTF-8, with U+FFFD for what is not."""


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """Tokens are text.

    before_bytes, after_bytes: stages in order, around the place where byte tokens are put together.
    byte_fallback: tokens `<0x00>` to `<0xFF>` are bytes: a run of them is UTF-8, or one U+FFFD each if it is not.
    strip: this character goes, up to `strip_count` times, from the start of the text.
    """

    before_bytes: tuple[Stage, ...] = ()
    after_bytes: tuple[Stage, ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    strip_count: int = 0

    def text(self, token: str, *, first: bool) -> str:
        """Text of a token that is not a byte."""
        for stage in self.before_bytes + self.after_bytes:
            token = stage(token, first)
        return token

    def run_text(self, run: bytes, *, first: bool) -> str:
        """Text of a whole run of byte tokens."""
        try:
            parts = [run.decode("utf-8")]
        except UnicodeDecodeError:
            parts = ["\ufffd"] * len(run)
        texts = []
        for part in parts:
            for stage in self.after_bytes:
                part = stage(part, first)
            texts.append(part)
            first = False
        return "".join(texts)


def read_decoder(description: dict[str, Any] | None) -> ByteLevelDecoder | PieceDecoder | None:
    """Sorts the "decoder" of a tokenizer.json; None when it is of no known form."""
    if description is None:
        return PieceDecoder(before_bytes=(_joined_by_spaces,))
    stages = description["decoders"] if description["type"] == "Sequence" else [description]
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return ByteLevelDecoder()
    before: list[Stage] = []
    after: list[Stage] | None = None
    fused, strip, strip_count = False, "", 0
    for stage in stages:
        kind = stage["type"]
        if kind == "ByteFallback" and after is None and not fused:
            after = []
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not strip and stage["stop"] == 0:
            strip, strip_count = stage["content"], stage["start"]
        elif (function := _stage(stage)) is not None and not fused:
            (before if after is None else after).append(function)
        else:
            return None
    return PieceDecoder(tuple(before), tuple(after or ()), after is not None, strip, strip_count)


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary; an added token that does not spell bytes is its own UTF-8."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _stage(description: dict[str, Any]) -> Stage | None:
    kind = description["type"]
    if kind == "Replace" and "String" in description["pattern"]:
        old, new = description["pattern"]["String"], description["content"]
        return lambda token, first: token.replace(old, new)
    if kind == "Metaspace":
        mark = description["replacement"]
        drops_first = description.get("prepend_scheme", "always") != "never"
        return lambda token, first: token.replace(mark, "" if first and drops_first else " ")
    if kind == "WordPiece":
        prefix = description["prefix"]
        tidy = _tidy if description["cleanup"] else str
        return lambda token, first: tidy(_word_piece(token, prefix, first=first))
    if kind == "Strip":
        content, start, stop = description["content"], description["start"], description["stop"]
        return lambda token, first: _strip(token, content, start, stop)
    return None


def _joined_by_spaces(token: str, first: bool) -> str:
    return token if first else " " + token


def _word_piece(token: str, prefix: str, *, first: bool) -> str:
    if first:
        return token
    return token.removeprefix(prefix) if token.startswith(prefix) else " " + token


def _strip(token: str, content: str, start: int, stop: int) -> str:
    for _ in range(start):
        token = token.removeprefix(content)
    for _ in range(stop):
        token = token.removesuffix(content)
    return token


def _tidy(text: str) -> str:
    # WordPiece's clean-up in the tokenizers library, token by token, in its order.
    for old, new in _TIDY:
        text = text.replace(old, new)
    return text


_TIDY = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _characters_of_bytes() -> dict[str, int]:
    # GPT-2's table: printable Latin-1 bytes stand for themselves, the others for characters from U+0100 up, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


#: Which byte a character of a byte-level vocabulary spells.
BYTE_OF_CHARACTER = _characters_of_bytes()
