"""One sequence's output text: tokens in, text that may be shown out.

It is made between two runs of the model, not beside the next one: a stop string decides whether there is a next token,
and the run has every core. It costs about half a microsecond a token; of 32 streaming sequences on SmolLM2-135M it was
0.01 % of the stepping thread's time (`push` against the whole step, two cores), so there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..sampling.params import SamplingParams
from .stop import StopHit, StopStrings
from .tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Detokenises a sequence's output and ends it at stop strings.

    Use: `push` each token; when it returns and `hit` is set, a stop string ended the sequence. When the sequence ends
    for another reason, call `finish` with the hit of `StopChecker`.

    text: everything returned so far.
    hit: the stop string's `StopHit`, or None.
    """

    __slots__ = ("_detokenizer", "_include", "_min_tokens", "_num_tokens", "_parts", "_stops", "hit")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, prompt_token_ids: Sequence[int] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        self._include = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, include=self._include) if params.stop else None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._parts: list[str] = []
        self.hit: StopHit | None = None

    @property
    def text(self) -> str:
        """Everything returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_id: int) -> str:
        """Takes the next output token; returns the text to show now (may be empty)."""
        self._num_tokens += 1
        return self._show(self._detokenizer.push(token_id))

    def finish(self, last_token_id: int | None = None, hit: StopHit | None = None) -> str:
        """The sequence ended outside the text; returns the rest of the text.

        last_token_id: the final token where it was not pushed, because `hit` came with it: the text of a stop token is
        shown only with `include_stop_str_in_output`.
        """
        shown = ""
        if last_token_id is not None:
            is_stop = hit is not None and hit.finish_reason == "stop"
            if not is_stop or self._include:
                shown = self.push(last_token_id)
        if self.hit is None:
            shown += self._show(self._detokenizer.finish())
        if self.hit is None and self._stops is not None:
            held = self._stops.finish()
            self._parts.append(held)
            shown += held
        return shown

    def _show(self, text: str) -> str:
        if self._stops is not None and text:
            text = self._stops.push(text, counts=self._num_tokens > self._min_tokens)
            if self._stops.matched is not None and self.hit is None:
                self.hit = StopHit("stop", self._stops.matched)
        if text:
            self._parts.append(text)
        return text
