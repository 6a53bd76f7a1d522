"""Our outputs as OpenAI's JSON: log-probabilities, usage, and the text that is new since the last look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from ..outputs import CompletionOutput, RequestOutput
from ..sampling import TokenLogprobs
from .errors import ApiError

__all__ = ["Deltas", "chat_logprobs", "completion_logprobs", "finish_reason", "usage"]

TokenText = Callable[[int], str]


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts and all returned choices."""
    finished = list(outputs)
    prompt = sum(len(o.prompt_token_ids) for o in finished)
    completion = sum(len(c.token_ids) for o in finished for c in o.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in finished)},
    }


def finish_reason(choice: CompletionOutput) -> str | None:
    """OpenAI knows "stop" and "length". Raises ApiError for a choice that ended with an error."""
    if choice.finish_reason == "error":
        raise ApiError(choice.error or "the request failed", status=500)
    return choice.finish_reason


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], token_text: TokenText, offset: int
) -> dict[str, Any]:
    """The legacy form: parallel lists, an entry for each token. `offset` is where the first token's text begins."""
    tokens = [token_text(token) for token in token_ids]
    ends = accumulate(map(len, tokens), initial=offset)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) if entry is not None else None for entry in entries],
        "top_logprobs": [_top(entry, token_text) if entry is not None else None for entry in entries],
        "text_offset": list(ends)[:-1],
    }


def _finite(logprob: float) -> float:
    """A log-probability as JSON can write it: OpenAI's number for a token that cannot come."""
    return max(logprob, -9999.0)


def _top(entry: TokenLogprobs, token_text: TokenText) -> dict[str, float]:
    pairs = zip(entry.top_token_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
    values = {token_text(token): _finite(value) for token, value in pairs}
    return values | {token_text(entry.token_id): _finite(entry.logprob)}


def chat_logprobs(entries: Sequence[TokenLogprobs], token_text: TokenText) -> dict[str, Any]:
    """The chat form: one object a token."""
    content = []
    for entry in entries:
        pairs = zip(entry.top_token_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
        top = [_token(token_text(token), value) for token, value in pairs]
        content.append({**_token(token_text(entry.token_id), entry.logprob), "top_logprobs": top})
    return {"content": content}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


class Deltas:
    """Remembers how much of each choice of one request was sent.

    offsets: by choice, where the text of the next token begins, for those who report it.
    """

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}
        self._texts: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._ended: set[int] = set()

    def new(self, choice: CompletionOutput) -> tuple[str, int, bool] | None:
        """New text, the number of tokens sent before, and whether the choice just ended; None when nothing is new."""
        if choice.index in self._ended:
            return None
        text_sent, tokens_sent = self._texts.get(choice.index, 0), self._tokens.get(choice.index, 0)
        text, ended = choice.text[text_sent:], choice.finish_reason is not None
        if not text and not ended and (choice.logprobs is None or len(choice.token_ids) == tokens_sent):
            return None
        self._texts[choice.index], self._tokens[choice.index] = len(choice.text), len(choice.token_ids)
        if ended:
            self._ended.add(choice.index)
        return text, tokens_sent, ended
