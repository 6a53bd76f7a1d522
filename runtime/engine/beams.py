"""Beam search in the engine: live beams are sequences that fork and share blocks; the policy is `sampling.beam`.

All live beams bring their candidates before any goes on. One that has brought them wants no token: it idles, or is
parked when its blocks are needed, until the others have caught up.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from ..outputs import CompletionOutput, RequestOutput
from ..sampling import BeamSearchParams
from ..sampling.beam import BeamHypothesis, BeamSearch, beam_candidates
from .request import PROMPT_CONTEXT, BaseRequest, ModelLimits, RequestInput, check_prompt
from .scheduler import Scheduler
from .sequence import Sequence

__all__ = ["Beam", "BeamRequest"]

_Candidates = tuple[NDArray[np.int64], NDArray[np.float64]]


class Beam:
    """The owner of a live beam's sequence."""

    __slots__ = ("request", "sequence")

    def __init__(self, request: BeamRequest, sequence: Sequence) -> None:
        self.request = request
        self.sequence = sequence
        sequence.owner = self


class BeamRequest(BaseRequest):
    """One prompt's beam search. Raises RequestError when it can never run."""

    #: What a Request has and a beam search never needs.
    prompt_logprobs = None
    forked = True

    def __init__(self, source: RequestInput, params: BeamSearchParams, limits: ModelLimits) -> None:
        super().__init__(source)
        check_prompt(source, limits)
        self._params = params
        self._limits = limits
        length = len(source.prompt_token_ids)
        room = limits.max_context - length
        self._max_tokens = length + min(params.max_tokens, room)
        self._search = BeamSearch(params, eos_token_ids=limits.eos_token_ids, max_output_tokens=room)
        self._brought: dict[Sequence, _Candidates] = {}
        self._next_index = 1
        self._reason: str | None = None
        self._error: str | None = None
        first = Sequence(
            source.request_id,
            source.prompt_token_ids,
            self._max_tokens,
            priority=source.priority,
            cache_salt=source.cache_salt,
        )
        self._first = first
        self.beams = [Beam(self, first)]

    @property
    def is_finished(self) -> bool:
        """True when the search is over, or was ended."""
        return self._reason is not None

    def take(self, beam: Beam, logits_V: NDArray[np.float32], scheduler: Scheduler) -> None:
        """Takes a beam's candidates; with the last one's, lets the search go on or ends it."""
        if not np.isfinite(logits_V.max()):
            self.end(scheduler, "error", "the model computed no distribution: its logits are not finite")
            return
        count = min(self._search.num_candidates, logits_V.size)
        self._brought[beam.sequence] = beam_candidates(logits_V[None, :], count)
        if len(self._brought) < len(self.beams):
            return
        brought = [self._brought[b.sequence] for b in self.beams]
        self._brought.clear()
        step = self._search.advance(np.concatenate([c[0] for c in brought]), np.concatenate([c[1] for c in brought]))
        if self._search.is_finished:
            self.end(scheduler, "stop")
            return
        self._follow(step.parents, step.token_ids, scheduler)

    def _follow(self, parents: tuple[int, ...], token_ids: tuple[int, ...], scheduler: Scheduler) -> None:
        """Forks and drops sequences so that beam i continues old beam parents[i]."""
        old, taken, new = self.beams, set(), []
        for index, beam in enumerate(old):
            if index not in parents:  # first of all: forks need the rows
                scheduler.finish(beam.sequence, "dropped")
        for parent in parents:
            beam = old[parent]
            if parent in taken:
                beam = Beam(self, self._child(beam.sequence))
                scheduler.fork(old[parent].sequence, beam.sequence)
            taken.add(parent)
            new.append(beam)
        for beam, token in zip(new, token_ids, strict=True):
            beam.sequence.append(token)
            scheduler.resume(beam.sequence)
        self.beams = new

    def _child(self, parent: Sequence) -> Sequence:
        child = Sequence(
            parent.request_id,
            parent.tokens,
            parent.max_tokens,
            index=self._next_index,
            priority=parent.priority,
            cache_salt=parent.cache_salt,
        )
        child.num_prompt_tokens = parent.num_prompt_tokens
        self._next_index += 1
        return child

    def end(self, scheduler: Scheduler, reason: str, error: str | None = None) -> None:
        """Ends the search; hypotheses found so far are its result, or the error if there is one."""
        for beam in self.beams:
            scheduler.finish(beam.sequence, reason)
        self._reason, self._error = reason, error
        self.finish_time = time.monotonic()

    def output(self) -> RequestOutput:
        """The search as its caller sees it: nothing before its end, then the best hypotheses."""
        found = self._search.best() if self.is_finished and self._reason != "error" else []
        outputs = [self._output(index, hypothesis) for index, hypothesis in enumerate(found)]
        if self.is_finished and not outputs:
            outputs = [CompletionOutput(index=0, text="", token_ids=[], finish_reason=self._reason, error=self._error)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.source.prompt,
            prompt_token_ids=self.source.prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=max(0, self._first.num_cached_tokens),
            metrics=self.metrics(),
        )

    def _output(self, index: int, hypothesis: BeamHypothesis) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self._text(hypothesis),
            token_ids=list(hypothesis.token_ids),
            finish_reason=hypothesis.finish_reason,
            stop_reason=hypothesis.stop_reason,
            cumulative_logprob=hypothesis.cumulative_logprob,
        )

    def _text(self, hypothesis: BeamHypothesis) -> str:
        tokenizer, prompt = self._limits.tokenizer, self.source.prompt_token_ids
        if tokenizer is None:
            return ""
        detokenizer = tokenizer.detokenizer(
            skip_special_tokens=self._params.skip_special_tokens, prompt_token_ids=prompt[-PROMPT_CONTEXT:]
        )
        ids = hypothesis.token_ids[:-1] if hypothesis.finish_reason == "stop" else hypothesis.token_ids
        text = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
        if self._params.echo:
            text = (self.source.prompt if self.source.prompt is not None else tokenizer.decode(prompt)) + text
        return text
