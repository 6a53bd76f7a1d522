"""A model's tokenizer: text to ids and back, through the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .detokenizer import Detokenization, IncrementalDetokenizer
from .errors import TokenizerError
from .reach import Reach

__all__ = ["Tokenizer"]


class Tokenizer:
    """Encodes prompts, decodes outputs. Immutable once loaded, so it may be shared between threads.

    Attributes:
        vocab_size: ids run from 0 to vocab_size - 1, added tokens included; a model's logits may be wider.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        decoder_description: the "decoder" of the tokenizer.json.
        reach: how much text a token stands for at most; None when nothing is known.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # Settings saved from training: a cut or padded prompt would be a silent error.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._detokenizations: dict[bool, Detokenization] = {}
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        description = json.loads(backend.to_str())
        self.decoder_description: dict[str, Any] | None = description["decoder"]
        self.reach = Reach.of(description)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Loads a tokenizer.json. Raises TokenizerError when there is none or the library cannot read it."""
        if not path.is_file():
            raise TokenizerError(_missing(path))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}; "
                "save it again with the library that made it, or update tokenizers"
            ) from error
        return cls(backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with `add_special_tokens`, whatever the tokenizer itself puts around it (often a BOS).

        Raises TokenizerError for what is no Unicode text (half of a surrogate pair, which JSON can spell).
        """
        try:
            # A batch, because the library's `encode` stops all other threads until it is done.
            ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise TokenizerError(
                f"{text!r:.80} is not Unicode text, so it has no tokens; correct the prompt"
            ) from error
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids as a whole. Ids that do not exist are left out."""
        try:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise TokenizerError(f"token ids {list(token_ids)!r:.80} cannot be decoded: {error}") from error
        return text

    def to_json(self) -> str:
        """The content of a tokenizer.json that gives the same tokenizer."""
        text: str = self._backend.to_str()
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary (not its text); None when the id does not exist."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its spelling; None when there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def detokenizer(
        self, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        """A detokenizer for one sequence's output, which continues `prompt_token_ids`.

        The prompt decides what the output's first token looks like: with it, a continuation keeps its leading space;
        without it, the output is decoded as a text of its own.
        """
        detokenizer = self._detokenization(skip_special_tokens=skip_special_tokens).start()
        for token_id in prompt_token_ids:
            detokenizer.push(token_id)
        detokenizer.end_prompt()
        return detokenizer

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for within a text, special tokens included.

        Where a token holds part of a character only its bytes are exact; decoding it alone would give U+FFFD.
        """
        return self._detokenization(skip_special_tokens=False).token_bytes(token_id)

    def _detokenization(self, *, skip_special_tokens: bool) -> Detokenization:
        if skip_special_tokens not in self._detokenizations:
            self._detokenizations[skip_special_tokens] = Detokenization(self, skip_special_tokens=skip_special_tokens)
        return self._detokenizations[skip_special_tokens]


#: For every caller: the command line takes text only.
_IDS = "without it, Python's LLM and the server take prompts as token ids"


def _missing(path: Path) -> str:
    if (path.parent / "tokenizer.model").is_file():
        reason = "only a sentencepiece tokenizer.model, which transformers' AutoTokenizer can save as tokenizer.json"
        return f"{path.parent} has no tokenizer.json but {reason}; {_IDS}"
    return (
        f"{path.parent} has no tokenizer.json, so text can be neither read nor written; copy it from the source model; "
        f"{_IDS}"
    )
