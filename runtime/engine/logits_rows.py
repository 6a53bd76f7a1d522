"""Which packed rows of a step need logits when not only the last row of each sampling entry does: rows of guessed
tokens, and rows of prompts whose log-probabilities are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..sampling import prompt_logprobs
from .plan import StepPlan
from .sequence import Sequence

__all__ = ["PromptReport", "logits_rows", "report_prompts"]


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Packed rows [row, row + end - begin) hold the logits of a prompt's positions [begin, end)."""

    sequence: Sequence
    begin: int
    end: int
    row: int


def logits_rows(plan: StepPlan) -> tuple[NDArray[np.int32], list[PromptReport]]:
    """Rows in the order in which they are read: each sample's (its guesses' included), then those of prompts."""
    ends = np.cumsum(plan.counts)
    parts = [np.arange(ends[i] - 1 - plan.sequences[i].num_guesses, ends[i]) for i in plan.samples]
    reports = _reports(plan)
    parts += [np.arange(r.row, r.row + r.end - r.begin) for r in reports]
    return np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.int32), reports


def _reports(plan: StepPlan) -> list[PromptReport]:
    reports = []
    first = 0
    for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
        done = sequence.owner.request.prompt_logprobs
        if done is not None and len(done) < sequence.num_prompt_tokens:
            # Entry j is about token j, whose logits belong to position j - 1.
            begin, end = max(start, len(done) - 1), min(start + count, sequence.num_prompt_tokens - 1)
            if begin < end:
                reports.append(PromptReport(sequence, begin, end, first + begin - start))
        first += count
    return reports


def report_prompts(reports: list[PromptReport], logits: NDArray[np.float32]) -> None:
    """Gives requests the log-probabilities of their prompts; `logits` are the rows of the reports, in order."""
    at = 0
    for report in reports:
        request = report.sequence.owner.request
        count = report.end - report.begin
        tokens = np.array(report.sequence.tokens[report.begin + 1 : report.end + 1], np.int64)
        top = request.source.params.prompt_logprobs
        request.prompt_logprobs.extend(prompt_logprobs(logits[at : at + count], tokens, top))
        at += count
