"""One step: plan, execute, sample, commit, or roll back. Owns the requests; used by one thread."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..model.batch import FeedBuilder
from ..model.runner import ModelRunner
from ..sampling import SampledTokens, Sampler
from .beams import Beam
from .block_table import BlockTables
from .errors import StepError
from .invariants import snapshot, violations
from .logits_rows import logits_rows, report_prompts
from .plan import StepPlan
from .request import Choice, ModelLimits
from .request_book import AnyRequest, RequestBook, text_of
from .scheduler import Scheduler
from .sequence import Sequence, SequenceState
from .speculation import guess_from_context

__all__ = ["Engine", "EngineParts", "InvariantError"]


class InvariantError(AssertionError):
    """The engine's own accounting is wrong (checked in debug mode)."""


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine is put together from."""

    scheduler: Scheduler
    runner: ModelRunner
    tables: BlockTables
    feeds: FeedBuilder
    limits: ModelLimits
    num_speculative: int = 0
    debug: bool = False


class Engine(RequestBook):
    """Requests in, tokens out. `step` runs one step and returns the requests that it changed."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts.scheduler, parts.limits)
        self.runner = parts.runner
        self._tables = parts.tables
        self._feeds = parts.feeds
        self._debug = parts.debug
        self._num_speculative = parts.num_speculative
        if parts.num_speculative:
            self.scheduler.guess = self._guess
        self._sampler = Sampler()
        # Sequences of a failed step and how far it would have brought them: each is run alone up to there.
        self._suspects: dict[Sequence, int] = {}

    def close(self) -> None:
        """Aborts every request and gives the caches back."""
        try:
            for request_id in list(self._requests):
                self.abort(request_id)
        finally:
            self.runner.close()

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> list[AnyRequest]:
        """Runs one step. Never raises for a failure of the model: the requests it concerns end with an error."""
        plan = self.scheduler.schedule(only=self._next_suspect())
        if plan.is_empty:
            return []
        self._tables.apply(plan.table_updates)
        num_guesses = sum([s.num_guesses for s in plan.sequences]) if self._num_speculative else 0
        try:
            self.runner.copy_blocks(plan.copies)
            rows, reports = logits_rows(plan) if self.num_reported or num_guesses else (None, [])
            logits = self.runner.execute(self._feeds.fill(plan, rows))
        except StepError as error:
            return self._fail(plan, error)
        except BaseException:
            self.scheduler.rollback(plan)  # or the prefix index would offer blocks that were never computed
            raise
        self.scheduler.commit(plan)
        if reports:
            report_prompts(reports, logits[len(plan.samples) + num_guesses :])
        changed: list[AnyRequest] = []
        sequences = [plan.sequences[i] for i in plan.samples]
        if num_guesses:
            sequences, logits = self._verify(sequences, logits, changed)
        if self.num_searches:
            sequences, logits = self._search(sequences, logits, changed)
        if sequences:
            changed += self._take(sequences, logits)
        if self._debug:
            self.check()
        return list(dict.fromkeys(changed))  # several choices of a request may have been guessed for

    def check(self) -> None:
        """Raises InvariantError when the accounting is wrong."""
        if found := violations(snapshot(self.scheduler)):
            raise InvariantError("; ".join(found))

    def _take(self, sequences: list[Sequence], logits: NDArray[np.float32]) -> list[AnyRequest]:
        """Samples a token for each sequence and gives it to its choice; returns the requests concerned."""
        choices: list[Choice] = [sequence.owner for sequence in sequences]
        if self.num_unforked:
            choices, rows = self._fork(choices)
            logits = logits[rows]
        sampled = self._sampler.sample(logits[: len(choices)], [choice.sampling for choice in choices])
        now = time.monotonic()
        finished = SequenceState.FINISHED
        for row, (choice, token) in enumerate(zip(choices, sampled.token_ids.tolist(), strict=True)):
            if choice.sequence.state is finished:
                continue
            if choice.request.first_token_time is None:
                choice.request.first_token_time = now
            self._give(choice, token, row, sampled)
        return list(dict.fromkeys([choice.request for choice in choices]))

    def _give(self, choice: Choice, token: int, row: int, sampled: SampledTokens) -> bool:
        """Gives a choice its token and what was reported of it; True when the choice ends here."""
        if row in sampled.errors:
            self.end(choice, "error", str(sampled.errors[row]))
            return True
        if row in sampled.logprobs:
            choice.logprobs.append(sampled.logprobs[row])
            choice.total_logprob += sampled.logprobs[row].logprob
        try:
            hit = choice.take(token)
        except Exception as failure:  # whatever it is, it concerns this choice and none of its companions
            self.end(choice, "error", text_of(failure))
            return True
        if hit is not None:
            self.end(choice, hit.finish_reason)
        return hit is not None

    def _guess(self, sequence: Sequence, limit: int) -> array[int]:
        """Guesses for a sequence that has begun its output; see Scheduler."""
        owner = sequence.owner
        if not isinstance(owner, Choice) or not owner.request.forked or not owner.sampling.num_output_tokens:
            return array("i")
        return guess_from_context(sequence.tokens, min(limit, self._num_speculative))

    def _verify(
        self, sequences: list[Sequence], logits: NDArray[np.float32], changed: list[AnyRequest]
    ) -> tuple[list[Sequence], NDArray[np.float32]]:
        """Samples the rows of guessed sequences; returns the other sequences and their logits."""
        rest: list[Sequence] = []
        rows: list[int] = []
        at = 0
        for sequence in sequences:
            count = sequence.num_guesses
            if count:
                try:
                    self._accept(sequence, logits[at : at + count + 1])
                except Exception as failure:
                    self.end(sequence.owner, "error", text_of(failure))
                changed.append(sequence.owner.request)
            else:
                rest.append(sequence)
                rows.append(at)
            at += count + 1
        return rest, logits[rows]

    def _accept(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        """Samples row after row while the guess before the row was right."""
        guesses, choice = sequence.take_guesses(), sequence.owner
        known = sequence.num_tokens
        for at in range(len(guesses) + 1):
            sampled = self._sampler.sample(logits[at : at + 1], [choice.sampling])
            token = int(sampled.token_ids[0])
            if self._give(choice, token, 0, sampled):
                return
            if at == len(guesses) or token != guesses[at]:
                break
        # What was computed for wrong guesses lies behind this and is written again.
        sequence.num_computed = known + at

    def _search(
        self, sequences: list[Sequence], logits: NDArray[np.float32], changed: list[AnyRequest]
    ) -> tuple[list[Sequence], NDArray[np.float32]]:
        """Gives beams their candidates; returns the other sequences and their logits."""
        rest: list[Sequence] = []
        rows: list[int] = []
        for row, sequence in enumerate(sequences):
            beam = sequence.owner
            if not isinstance(beam, Beam):
                rest.append(sequence)
                rows.append(row)
            elif not sequence.is_finished:
                request = beam.request
                if request.first_token_time is None:
                    request.first_token_time = time.monotonic()
                try:
                    request.take(beam, logits[row], self.scheduler)
                except Exception as failure:
                    request.end(self.scheduler, "error", text_of(failure))
                if request.is_finished:
                    self.forget(request)
                    changed.append(request)
        return rest, logits[rows]

    def _fork(self, choices: list[Choice]) -> tuple[list[Choice], list[int]]:
        """Starts the other choices of requests that sample their first token; row r of the logits serves several."""
        out: list[Choice] = []
        rows: list[int] = []
        for row, choice in enumerate(choices):
            request = choice.request
            members = [choice] if request.forked else request.choices
            if not request.forked:
                self.set_forked(request)
                for other in members[1:]:
                    self.scheduler.fork(choice.sequence, other.sequence)
            out += members
            rows += [row] * len(members)
        return out, rows

    def kv_utilisation(self) -> float:
        """Live tokens, each shared block once, over slots of owned blocks; over all groups, 1 when nothing is owned."""
        cache = self.scheduler.cache
        owned = cache.block_size * sum(pool.num_owned for pool in cache.pools)
        if not owned:
            return 1.0
        empty: dict[int, int] = {}  # slots by block: forks share one that is not full
        for sequence in self.scheduler.running:
            first, used = divmod(sequence.num_computed, cache.block_size)
            for column, block in enumerate(sequence.blocks[0][first:]):
                empty[block] = cache.block_size - (0 if column else used)
        return 1.0 - sum(empty.values()) * len(cache.pools) / owned

    # -- failures -------------------------------------------------------------------------------------------------

    def _next_suspect(self) -> Sequence | None:
        """The sequence to be run alone: the first that has not come to where the failed step would have brought it."""
        for sequence, end in list(self._suspects.items()):
            if sequence.state in (SequenceState.WAITING, SequenceState.RUNNING) and sequence.num_computed < end:
                return sequence
            del self._suspects[sequence]
        return None

    def _fail(self, plan: StepPlan, error: StepError) -> list[AnyRequest]:
        """Rolls a failed step back. Alone in it, a request ends with the error; several are run alone next."""
        self.scheduler.rollback(plan)  # takes guesses away
        ends = {
            s: min(start + n, s.num_tokens)
            for s, start, n in zip(plan.sequences, plan.starts, plan.counts, strict=True)
        }
        sequences = [s for s in plan.sequences if not s.is_finished]
        requests = list(dict.fromkeys([s.owner.request for s in sequences]))
        if len(requests) > 1:
            self._suspects.update({s: ends[s] for s in sequences})
            return []
        for request in requests:
            self.abort(request.request_id, "error", str(error))
        return requests
