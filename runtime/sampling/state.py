"""What sampling remembers about one sequence between its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from .errors import SamplingParamsError
from .grammar import Grammar
from .params import SamplingParams
from .penalties import BannedSequences, TokenPenalties
from .rng import UniformStream

__all__ = ["SamplingState"]


class SamplingState:
    """The parameters, counts and random stream of one sequence; the engine keeps one beside each sequence.

    It survives preemption as it is, because it depends on the tokens alone; it can be made anew from them at any time
    (`output_token_ids`), with the same results.

    Attributes for the sampler and the engine:
        params: what the caller asked for.
        num_output_tokens: output tokens appended so far; the next one has this position.
        takes_argmax: the next token is the argmax of the raw logits and nothing else is reported.
        grammar: follows the output where it must have a form; None where it need not.
        edits_logits: some processor changes this sequence's logits.
        logprobs: how many likeliest tokens to report beside the chosen one (-1: all); None reports nothing.

    Raises SamplingParamsError when a token id of the parameters is outside the vocabulary, or when there are
    `structured_outputs` without their grammar.
    """

    __slots__ = (
        "_allowed",
        "_banned",
        "_bias_ids",
        "_bias_values",
        "_penalties",
        "_tracks_tokens",
        "_uniforms",
        "_until_min_tokens",
        "edits_logits",
        "grammar",
        "logprobs",
        "num_output_tokens",
        "params",
        "takes_argmax",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        seed: int,
        sequence: int = 0,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        eos_token_ids: Iterable[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """`seed` is `params.seed`, or `fresh_seed()` where that is None; `sequence` the index of the choice.

        grammar: of `params.structured_outputs`, compiled.
        """
        _check_vocabulary(params, vocab_size)
        if params.structured_outputs is not None and grammar is None:
            raise SamplingParamsError(
                "structured_outputs were not compiled; submit the request through LLM or AsyncLLM"
            )
        self.params = params
        self.num_output_tokens = 0
        self._uniforms = UniformStream(seed, sequence=sequence)
        # best_of ranks the choices by log-probability, so it needs the chosen token's.
        ranks = params.num_sequences > params.n
        self.logprobs = params.logprobs if params.logprobs is not None or not ranks else 0

        self._allowed = _ids(params.allowed_token_ids)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.grammar = None if grammar is None else grammar.start(may_end=not params.ignore_eos)
        self._until_min_tokens = _ids(sorted(t for t in ends if t < vocab_size)) if params.min_tokens else None
        bias = sorted((params.logit_bias or {}).items())
        self._bias_ids = _ids([token_id for token_id, _ in bias]) if bias else None
        self._bias_values = np.array([value for _, value in bias], np.float32)
        self._penalties = TokenPenalties(params, prompt_token_ids) if TokenPenalties.needed(params) else None
        self._banned = BannedSequences(params.bad_words_token_ids) if params.bad_words_token_ids else None
        self._tracks_tokens = self._penalties is not None or self._banned is not None
        edits = (self._allowed, self.grammar, self._until_min_tokens, self._bias_ids, self._penalties, self._banned)
        self.edits_logits = any(edit is not None for edit in edits)
        self.takes_argmax = params.is_greedy and not self.edits_logits and self.logprobs is None
        self.extend(output_token_ids)

    def append(self, token_id: int) -> None:
        """Takes up one output token, in order. Raises SamplingError for one that the grammar does not allow."""
        self.num_output_tokens += 1
        if self.grammar is not None:
            self.grammar.append(token_id)
        if self._tracks_tokens:
            if self._penalties is not None:
                self._penalties.append(token_id)
            if self._banned is not None:
                self._banned.append(token_id)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes up several output tokens, in order."""
        for token_id in token_ids:
            self.append(token_id)

    def uniform(self, attempt: int = 0) -> float:
        """The random number that picks the next output token; further ones where the first is not enough."""
        return self._uniforms.at(self.num_output_tokens, attempt)

    def edit(self, row_V: NDArray[np.float32]) -> None:
        """Applies processors 1 to 6 of `Sampler` to one row of logits in place."""
        if self._allowed is not None:
            kept = row_V[self._allowed]
            row_V.fill(-np.inf)
            row_V[self._allowed] = kept
        if self.grammar is not None:
            self.grammar.apply(row_V)
        if self._banned is not None:
            row_V[self._banned.next_banned()] = -np.inf
        if self._until_min_tokens is not None and self.num_output_tokens < self.params.min_tokens:
            row_V[self._until_min_tokens] = -np.inf
        if self._bias_ids is not None:
            row_V[self._bias_ids] += self._bias_values
        if self._penalties is not None:
            self._penalties.apply(row_V)


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    named = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "bad_words_token_ids": chain.from_iterable(params.bad_words_token_ids),
    }
    for name, ids in named.items():
        for token_id in ids:
            if token_id >= vocab_size:
                raise SamplingParamsError(
                    f"{name} holds token id {token_id}, but the model's vocabulary ends at {vocab_size - 1}; "
                    "use ids of this model's tokenizer"
                )


def _ids(token_ids: Iterable[int] | None) -> NDArray[np.int64] | None:
    return None if token_ids is None else np.array(list(token_ids), np.int64)
