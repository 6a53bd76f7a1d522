"""How many requests run at once in one fixed KV memory: paged, against contiguous caches reserved ahead.

    python -m tests.performance.concurrency [--slots 16384] [--requests 1000] [--seeds 3] [--json FILE]

The real engine (scheduler, pool, tables, sampler) on a model that computes nothing and ends each output where the
workload says, against a simulation of the same queue over contiguous reservations. No time is measured. In both a
step has 512 tokens at most: decodes first, then prompts in chunks, then whoever fits, first come first served.

Workload: all requests at once, prompts of 16 to 512 and outputs of 16 to 256 tokens, log-uniform and independent. A
client asks for at most 256 tokens; the sequence ends by its own stop token. A contiguous cache has to be reserved for
prompt + 256 (*own maximum*), or for the longest request that the server takes (*one maximum*, 512 + 256). Reservations
are placed first fit in one stretch of the same number of slots; freed neighbours merge.

The loaded phase is that in which requests wait. Printed: mean over its steps and peak, and what reservations would
reach that know each output's length (*clairvoyant*, which no server does). Target: 1.9 times the mean of own maximum
(median over seeds), without preemption. In a much larger memory the 512 tokens a step bound all of them, not memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pagegraft.custom_ops.manifest import INPUT_IDS, LOGITS_INDICES, POSITION_IDS
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.bench.workload import LengthRange
from pagegraft.runtime.engine.plan import BlockCopy
from pagegraft.runtime.engine.request import RequestInput
from pagegraft.runtime.model.runner import Feeds, KVGroup

from tests.wiring import synthetic

BUDGET, BLOCK_SIZE, SEQUENCES = 512, 16, 512
PROMPT, OUTPUT = LengthRange(16, 512), LengthRange(16, 256)
TARGET = 1.9
#: Token ids from here on mean: this sequence has `id - ENDS` tokens when it is complete. Below are those of prompts.
ENDS = 64
VOCAB = ENDS + PROMPT.high + OUTPUT.high + 1
STOP = 0


@dataclass(frozen=True)
class Job:
    """Tokens of prompt and output of one request."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Concurrency:
    """Requests that ran at once; mean over the steps in which others waited."""

    mean: float
    peak: int
    steps: int

    @classmethod
    def of(cls, loaded: Sequence[int]) -> Concurrency:
        """Of a list of counts, one a step."""
        return cls(statistics.fmean(loaded), max(loaded), len(loaded))


class EndsByItself:
    """A ModelRunner that computes nothing: the last prompt token says how long the sequence becomes, and so does each
    output token but the last, which is the stop token."""

    def allocate_kv(self, groups: Sequence[KVGroup]) -> None:
        """Nothing is stored."""

    def execute(self, feeds: Feeds) -> NDArray[np.float32]:
        """Logits with one peak a row."""
        rows = feeds[LOGITS_INDICES]
        last, position = feeds[INPUT_IDS][rows], feeds[POSITION_IDS][rows]
        following = np.where(position + 2 >= last - ENDS, STOP, last)
        logits = np.zeros((len(rows), VOCAB), np.float32)
        logits[np.arange(len(rows)), following] = 1.0
        return logits

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """Nothing is held."""


def workload(count: int, seed: int) -> list[Job]:
    """Log-uniform lengths."""
    rng = np.random.default_rng(seed)
    return [Job(p, o) for p, o in zip(PROMPT.draw(rng, count), OUTPUT.draw(rng, count), strict=True)]


def paged(jobs: Sequence[Job], slots: int) -> tuple[Concurrency, int]:
    """The engine's concurrency and preemptions with so many slots of KV memory."""
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT.high, stop_token_ids=[STOP])
    settings: dict[str, Any] = {"max_num_batched_tokens": BUDGET, "max_num_seqs": SEQUENCES}
    with tempfile.TemporaryDirectory() as scratch:
        # The synthetic model's geometry: one layer, a key of one float32 a token.
        folder = synthetic.build(Path(scratch) / "model", vocab_size=VOCAB, block_size=BLOCK_SIZE)
        with LLM(folder, kv_memory=slots * 4, runner=EndsByItself(), **settings) as llm:
            requests = []
            for i, job in enumerate(jobs):
                prompt = [*rng.integers(1, ENDS, job.prompt - 1).tolist(), ENDS + job.prompt + job.output]
                requests.append(llm.engine.add(RequestInput(request_id=str(i), prompt_token_ids=prompt, params=params)))
            loaded = []
            while llm.engine.has_work:
                llm.engine.step()
                if len(llm.engine.scheduler.waiting):
                    loaded.append(len(llm.engine.scheduler.running))
            lengths = [len(request.output().outputs[0].token_ids) for request in requests]
            if lengths != [job.output for job in jobs]:
                raise SystemExit("an output did not end where the workload says")
            return Concurrency.of(loaded), llm.engine.scheduler.counters.preemptions


class Stretch:
    """One stretch of slots in which reservations are placed first fit."""

    def __init__(self, slots: int) -> None:
        self._holes = [(0, slots)]  # start, length; in order, never touching

    def reserve(self, length: int) -> int | None:
        """Where a reservation was placed; None when no hole is large enough."""
        for i, (start, size) in enumerate(self._holes):
            if size >= length:
                self._holes[i : i + 1] = [(start + length, size - length)] if size > length else []
                return start
        return None

    def free(self, start: int, length: int) -> None:
        """Gives a reservation back."""
        merged: list[tuple[int, int]] = []
        for at, size in sorted([*self._holes, (start, length)]):
            if merged and sum(merged[-1]) == at:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((at, size))
        self._holes = merged


@dataclass
class _Running:
    job: Job
    start: int
    reserved: int
    computed: int = 0

    @property
    def ended(self) -> bool:
        """The last output token is sampled and never computed."""
        return self.computed >= self.job.prompt + self.job.output - 1


def contiguous(jobs: Sequence[Job], slots: int, reservations: Sequence[int]) -> Concurrency:
    """The same queue over contiguous caches of the lengths given."""
    stretch, waiting = Stretch(slots), deque(zip(jobs, reservations, strict=True))
    running: list[_Running] = []
    loaded = []
    while waiting or running:
        left = BUDGET
        for one in sorted(running, key=lambda r: r.computed < r.job.prompt):
            count = min(left, max(1, one.job.prompt - one.computed))
            one.computed += count
            left -= count
        while waiting and left > 0:
            job, length = waiting[0]
            start = stretch.reserve(length)
            if start is None:
                break
            waiting.popleft()
            count = min(left, job.prompt)
            left -= count
            running.append(_Running(job, start, length, count))
        # Counted as in the engine: after those that ended in this step have left.
        for one in [r for r in running if r.ended]:
            stretch.free(one.start, one.reserved)
            running.remove(one)
        if waiting:
            loaded.append(len(running))
    return Concurrency.of(loaded)


def measure(slots: int, count: int, seed: int) -> dict[str, Any]:
    """Figures by name."""
    jobs = workload(count, seed)
    ours, preemptions = paged(jobs, slots)
    reserved = {
        "own_maximum": [job.prompt + OUTPUT.high for job in jobs],
        "one_maximum": [PROMPT.high + OUTPUT.high] * count,
        "clairvoyant": [job.prompt + job.output for job in jobs],
    }
    others = {name: contiguous(jobs, slots, lengths) for name, lengths in reserved.items()}
    return {
        "seed": seed,
        "preemptions": preemptions,
        "paged": asdict(ours),
        **{name: asdict(other) for name, other in others.items()},
        "mean_ratio": {name: ours.mean / other.mean for name, other in others.items()},
        "peak_ratio": {name: ours.peak / other.peak for name, other in others.items()},
    }


def main() -> None:
    """Prints the figures as JSON; ends with 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16_384, help="token slots of the KV memory")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3, help="workloads to draw")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    runs = [measure(arguments.slots, arguments.requests, seed) for seed in range(arguments.seeds)]
    preemptions = sum(run["preemptions"] for run in runs)
    ratio = statistics.median(run["mean_ratio"]["own_maximum"] for run in runs)
    figures = {
        "slots": arguments.slots,
        "requests": arguments.requests,
        "preemptions": preemptions,
        "mean_over_own_maximum": ratio,
        "peak_over_own_maximum": statistics.median(run["peak_ratio"]["own_maximum"] for run in runs),
        "mean_over_one_maximum": statistics.median(run["mean_ratio"]["one_maximum"] for run in runs),
        "runs": runs,
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")
    sys.exit(ratio < TARGET or preemptions > 0)


if __name__ == "__main__":
    main()
