"""Text from a growing list of tokens, a token at a time.

The promise: after `finish`, what was returned adds up to the tokenizer's decoding of all the ids (of prompt and output,
less what the prompt alone gave), nothing returned is ever taken back, and no character comes in halves.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from .pieces import ByteLevelDecoder, PieceDecoder, byte_level_bytes, read_decoder

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["MAX_HELD_BYTES", "Detokenization", "IncrementalDetokenizer"]

#: Byte tokens of a byte-fallback tokenizer that are held at most. The library decodes a run of them as a whole (all
#: U+FFFD if any part is not UTF-8), so a run within this length comes out exactly as there; of a longer one, which
#: would delay text without bound, complete characters are returned as they come.
MAX_HELD_BYTES: Final = 32

_MAX_HELD_TOKENS: Final = 16
_REPLACEMENT: Final = "\ufffd"


class IncrementalDetokenizer(Protocol):
    """One sequence's text. Not shared between sequences."""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now and was not before (often one token's)."""

    def end_prompt(self) -> str:
        """What was pushed so far is no output; returns what of it was held back and is whole characters."""

    def finish(self) -> str:
        """Returns what was held back; an incomplete character becomes U+FFFD. Nothing may be pushed afterwards."""


class Detokenization:
    """How one tokenizer's tokens become text; makes the detokenizers of its sequences, which share its table."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        decoder = read_decoder(tokenizer.decoder_description)
        vocabulary = _Vocabulary(tokenizer, skip_special_tokens=skip_special_tokens)
        #: Makes a detokenizer for one sequence.
        self.start: Callable[[], IncrementalDetokenizer]
        #: The bytes that a token adds to a text where it is not the first.
        self.token_bytes: Callable[[int], bytes]
        if isinstance(decoder, ByteLevelDecoder):
            bytes_table = _ByteTable(vocabulary)
            self.start = partial(_ByteLevelDetokenizer, bytes_table)
            self.token_bytes = bytes_table.__getitem__
        elif isinstance(decoder, PieceDecoder):
            piece_table = _PieceTable(vocabulary, decoder)
            self.start = partial(_PieceDetokenizer, piece_table)
            self.token_bytes = piece_table.token_bytes
        else:
            self.start = partial(_WindowDetokenizer, tokenizer, skip_special_tokens=skip_special_tokens)
            self.token_bytes = lambda token_id: tokenizer.decode(
                [token_id], skip_special_tokens=skip_special_tokens
            ).encode()


class _Vocabulary:
    """Token id -> what a detokenizer adds for it, made on first use; shared by the sequences of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()

    def token(self, token_id: int) -> str | None:
        """The token's spelling; None for one that does not exist or is left out."""
        return None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)


class _ByteTable(dict[int, bytes]):
    """Token id -> bytes."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> bytes:
        token = self._vocabulary.token(token_id)
        return self.setdefault(token_id, b"" if token is None else byte_level_bytes(token))


class _PieceTable(dict[int, "str | int | None"]):
    """Token id -> text where it is not first, or the value of a byte token, or None if it is left out."""

    def __init__(self, vocabulary: _Vocabulary, decoder: PieceDecoder) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.decoder = decoder

    def __missing__(self, token_id: int) -> str | int | None:
        token = self.vocabulary.token(token_id)
        value: str | int | None = None
        if token is not None:
            byte = _byte_value(token) if self.decoder.byte_fallback else None
            value = self.decoder.text(token, first=False) if byte is None else byte
        return self.setdefault(token_id, value)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text where it is not the first."""
        piece = self[token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()


class _ByteLevelDetokenizer:
    """Byte-level vocabularies: at most the three bytes of an incomplete character are held."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._table[token_id])

    def end_prompt(self) -> str:
        return ""  # only parts of characters are held

    def finish(self) -> str:
        return self._decode(b"", True)


class _PieceDetokenizer:
    """Vocabularies of text pieces, with or without byte fallback: at most `MAX_HELD_BYTES` byte tokens are held."""

    __slots__ = ("_decoder", "_first", "_run", "_run_is_first", "_strip_left", "_table")

    def __init__(self, table: _PieceTable) -> None:
        self._table = table
        self._decoder = table.decoder
        self._first = True
        self._run = bytearray()
        self._run_is_first = False
        self._strip_left = table.decoder.strip_count

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece is None:
            return ""
        first, self._first = self._first, False
        if isinstance(piece, int):
            if not self._run:
                self._run_is_first = first
            self._run.append(piece)
            return self._strip(self._release()) if len(self._run) > MAX_HELD_BYTES else ""
        if first:
            piece = self._decoder.text(self._table.vocabulary.token(token_id) or "", first=True)
        text = self._end_run() + piece if self._run else piece
        return self._strip(text) if self._strip_left else text

    def end_prompt(self) -> str:
        try:
            self._run.decode()
        except UnicodeDecodeError:  # the output may complete it
            return ""
        return self._strip(self._end_run())

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        return self._decoder.run_text(run, first=self._run_is_first)

    def _release(self) -> str:
        """Parts with the complete characters of a run that is too long; the rest stays held."""
        text, used = codecs.utf_8_decode(bytes(self._run), "replace", False)
        del self._run[:used]
        first, self._run_is_first = self._run_is_first, False
        return self._decoder.run_text(text.encode("utf-8"), first=first)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._decoder.strip):
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class _WindowDetokenizer:
    """Any other decoder: decodes a window of recent tokens with and without the new ones and returns the difference.

    Exact for decoders whose text at a token depends only on a few tokens before it; text that ends in an incomplete
    character is held, for at most `_MAX_HELD_TOKENS` tokens.
    """

    __slots__ = ("_decode", "_ids", "_read", "_start")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._start = 0  # the window
        self._read = 0  # tokens whose text was returned

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(hold=len(self._ids) - self._read <= _MAX_HELD_TOKENS)

    def end_prompt(self) -> str:
        return ""  # only text that ends in part of a character is held

    def finish(self) -> str:
        return self._advance(hold=False)

    def _advance(self, *, hold: bool) -> str:
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if hold and (len(text) <= len(known) or text.endswith(_REPLACEMENT)):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(known) :]


def _byte_value(token: str) -> int | None:
    """Value of a token spelled `<0xE4>`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
