"""A context of 131,072 tokens, chunked through the engine beside short requests, against the source model.

    python -m tests.performance.long_context [--length 131072] [--kv-dtype int8] [--json FILE]

The model is that of `needle_model`, exported and converted here. Five needles (a token and four that follow it, which
stand nowhere else) lie at depths from the beginning to the end of random tokens. The first question comes with the
whole context, the other four afterwards on the shared prefix. What is checked, and fails the run:

* answers: each needle is copied, through the engine and by the source in plain onnxruntime alike;
* logits: of the last five positions of each question, within 1e-4 of their standard deviation of what float64 makes of
  the source's past; of the source's logits within that and what float32 puts these off themselves; both within 1 % of
  what hiding an eighth of the source's past changes (int8 caches: within half of the deviation);
* streaming, counted in steps: while the long prompt is computed, each short request that has begun gets one token in
  every step, a new one its first token within three, and the long one moves in every step;
* memory: the pool has the bytes that tokens times bytes per token make, the context holds just its blocks, and the
  process grows by no more than the pool and 64 MiB.

Needs torch.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.runtime import LLM, RequestOutput, SamplingParams
from pagegraft.runtime.engine.request import Request, RequestInput

from tests.performance.needle_context import NEEDLE_LENGTH, NEEDLES, Context, Source, log_softmax, make_context
from tests.performance.needle_model import HEAD_SIZE, LAYERS, VOCAB, exact_logits, export_needle_model

BLOCK_SIZE, BUDGET, SHORT_REQUESTS = 16, 512, 4
#: Bytes that the process may grow by beside the pool.
MARGIN = 64 << 20
#: A token's key and value in all layers; int8 has a scale beside each.
TOKEN_BYTES = {"float32": LAYERS * 2 * HEAD_SIZE * 4, "int8": LAYERS * 2 * (HEAD_SIZE + 4)}
#: Largest difference of logits, of their standard deviation and of the effect of the context.
LIMITS = {"float32": (1e-4, 0.01), "int8": (0.5, math.inf)}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class Streaming:
    """What short requests got while the long prompt was computed; counts are steps."""

    steps: int = 0
    finished: int = 0
    tokens: int = 0
    missed: int = 0  # (request that had begun, step) without a token
    slowest_first_token: int = 0
    smallest_chunk: int = BUDGET
    outputs: list[RequestOutput] = field(default_factory=list)


class _Shorts:
    """Keeps `SHORT_REQUESTS` short requests running, one after the other."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._llm, self._rng = llm, np.random.default_rng(seed)
        self._live: dict[str, tuple[Request, int]] = {}
        self._count = 0
        self.seen = Streaming()

    def refill(self) -> None:
        """Adds requests until so many run."""
        while len(self._live) < SHORT_REQUESTS:
            prompt = self._rng.integers(0, VOCAB, int(self._rng.integers(8, 128))).tolist()
            params = SamplingParams(max_tokens=int(self._rng.integers(8, 64)), logprobs=VOCAB, **GREEDY)
            name = f"short{self._count}"
            self._live[name] = _add(self._llm, name, prompt, params), self.seen.steps
            self._count += 1

    def step(self) -> None:
        """One step of the engine, and what each short request got of it."""
        before = {name: _received(request) for name, (request, _) in self._live.items()}
        self._llm.engine.step()
        self.seen.steps += 1
        for name, (request, since) in list(self._live.items()):
            gained = _received(request) - before[name]
            self.seen.tokens += gained
            self.seen.missed += before[name] > 0 and gained != 1
            waited = self.seen.steps - since
            if before[name] == 0:
                self.seen.slowest_first_token = max(self.seen.slowest_first_token, waited)
            if request.is_finished:
                self.seen.finished += 1
                self.seen.outputs.append(self._live.pop(name)[0].output())


def _add(llm: LLM, name: str, prompt: list[int], params: SamplingParams) -> Request:
    request = llm.engine.add(RequestInput(request_id=name, prompt_token_ids=prompt, params=params))
    assert isinstance(request, Request)
    return request


def _received(request: Request) -> int:
    return request.choices[0].sampling.num_output_tokens


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What the engine did. Bytes; `answers` are the outputs of the five questions."""

    answers: list[RequestOutput]
    streaming: Streaming
    seconds: float
    pool_bytes: int
    pool_bytes_wanted: int
    context_blocks: int
    grown_bytes: int


def run_engine(folder: Path, context: Context, kv_dtype: str) -> EngineRun:
    """The first question beside short requests, then the others."""
    blocks = -(-len(context.tokens) // BLOCK_SIZE) + 128
    wanted = blocks * BLOCK_SIZE * TOKEN_BYTES[kv_dtype]
    params = SamplingParams(max_tokens=NEEDLE_LENGTH, logprobs=VOCAB, **GREEDY)
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": BUDGET, "max_num_seqs": 16}
    with LLM(folder, kv_memory=wanted, **settings) as llm:
        llm.generate({"prompt_token_ids": [1] * 600}, SamplingParams(max_tokens=2, **GREEDY))
        base, start = _reset_peak(), time.perf_counter()
        shorts = _Shorts(llm, 1)
        long = _add(llm, "long", [*context.tokens, context.needles[0][0]], params)
        sequence = long.choices[0].sequence
        while not _received(long):
            shorts.refill()
            before = sequence.num_computed
            shorts.step()
            if sequence.num_prompt_tokens - before > BUDGET:
                shorts.seen.smallest_chunk = min(shorts.seen.smallest_chunk, sequence.num_computed - before)
        held = len(sequence.blocks[0])
        seconds = time.perf_counter() - start
        others = [
            _add(llm, f"needle{i}", [*context.tokens, needle[0]], params)
            for i, needle in enumerate(context.needles[1:], 1)
        ]
        while llm.engine.has_work:
            llm.engine.step()
        return EngineRun(
            answers=[request.output() for request in (long, *others)],
            streaming=shorts.seen,
            seconds=seconds,
            pool_bytes=llm.model.kv_bytes,
            pool_bytes_wanted=wanted,
            context_blocks=held,
            grown_bytes=_peak() - base,
        )


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _reset_peak() -> int:
    """Lets the kernel's mark of the largest resident memory start from now; returns it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def reported(output: RequestOutput) -> NDArray[np.float64]:
    """The log-probabilities `[output tokens, vocab]` that a request asked for."""
    rows = np.empty((len(output.outputs[0].token_ids), VOCAB))
    for row, entry in zip(rows, output.outputs[0].logprobs or (), strict=True):
        row[np.asarray(entry.top_token_ids)] = entry.top_logprobs
    return rows


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Engine against source. Differences are the largest, of the standard deviation of the source's logits.

    exact_difference, source_noise: of the engine's and of the source's logits to those of float64 behind the same past.
    effect: what zeroing an eighth of the source's past (between two needles) changes at least.
    """

    difference: float
    exact_difference: float
    source_noise: float
    effect: float
    short_difference: float
    needles_found: int
    source_needles_found: int
    source_seconds: float


def compare(source: Source, context: Context, run: EngineRun) -> Agreement:
    """Runs the source over the context once, and behind it over each question and the engine's answer to it."""
    start = time.perf_counter()
    short = max(_difference(source, output, source.past)[0] for output in run.streaming.outputs)
    source.read(context.tokens)
    length = len(context.tokens)
    hidden = source.past_without(length * 5 // 16, length * 7 // 16)
    differences, exact, noise, effects, found, own = [], [], [], [], 0, 0
    for needle, output in zip(context.needles, run.answers, strict=True):
        asked = [needle[0], *output.outputs[0].token_ids[:-1]]
        difference, logits = _difference(source, output, source.past, asked)
        differences.append(difference)
        right = log_softmax(exact_logits(asked, list(source.past.values())))
        exact.append(float(np.abs(reported(output) - right).max() / logits.std()))
        noise.append(float(np.abs(log_softmax(logits) - right).max() / logits.std()))
        effects.append(float(np.abs(source.logits(asked, hidden) - logits).max() / logits.std()))
        found += list(output.outputs[0].token_ids[:-1]) == needle[1:]
        own += logits.argmax(-1)[: len(needle) - 1].tolist() == needle[1:]
    return Agreement(
        difference=max(differences),
        exact_difference=max(exact),
        source_noise=max(noise),
        effect=min(effects),
        short_difference=short,
        needles_found=found,
        source_needles_found=own,
        source_seconds=time.perf_counter() - start,
    )


def _difference(
    source: Source, output: RequestOutput, past: dict[str, NDArray[np.float32]], tokens: list[int] | None = None
) -> tuple[float, NDArray[np.float64]]:
    """Of an output's log-probabilities to the source's, and the source's logits for these positions."""
    ours = reported(output)
    if tokens is None:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    logits = source.logits(tokens, past)[-len(ours) :]
    return float(np.abs(ours - log_softmax(logits)).max() / logits.std()), logits


def failures(context: Context, run: EngineRun, agreement: Agreement, kv_dtype: str) -> list[str]:
    """What does not hold; see the head of this file."""
    streaming, (tolerance, fraction) = run.streaming, LIMITS[kv_dtype]
    cached = [output.num_cached_tokens for output in run.answers[1:]]
    checks = {
        "every needle is copied by the source": agreement.source_needles_found == NEEDLES,
        "every needle is copied by the engine": agreement.needles_found == NEEDLES,
        f"logits within {tolerance} of those of float64": agreement.exact_difference <= tolerance,
        f"logits within {tolerance} and its rounding of the source's": agreement.difference
        <= tolerance + agreement.source_noise,
        f"logits within {fraction} of the context's effect": agreement.difference <= fraction * agreement.effect,
        f"short requests' logits within {tolerance}": agreement.short_difference <= tolerance,
        "a token a step for each short request": streaming.missed == 0 and streaming.finished > 0,
        "a first token within three steps": streaming.slowest_first_token <= 3,
        "the long prompt moves in every step": streaming.smallest_chunk >= (BUDGET - SHORT_REQUESTS) // 2,
        "pool bytes as computed": run.pool_bytes == run.pool_bytes_wanted,
        "blocks as computed": run.context_blocks == len(context.tokens) // BLOCK_SIZE + 1,
        "resident memory within pool and margin": run.grown_bytes <= run.pool_bytes + MARGIN,
        "later questions find the context": min(cached) >= len(context.tokens) - BLOCK_SIZE,
    }
    return [name for name, holds in checks.items() if not holds]


def measure(length: int, kv_dtype: str, scratch: Path) -> dict[str, Any]:
    """Everything; figures by name, `failed` among them."""
    context = make_context(length)
    export_needle_model(scratch / "source", max_positions=2 * length)
    convert(scratch / "source", scratch / "paged", ConvertOptions(kv_dtype=None if kv_dtype == "float32" else kv_dtype))
    run = run_engine(scratch / "paged", context, kv_dtype)
    agreement = compare(Source(scratch / "source"), context, run)
    streaming = {k: v for k, v in asdict(run.streaming).items() if k != "outputs"}
    return {
        "length": length,
        "kv_dtype": kv_dtype,
        "bytes_per_token": TOKEN_BYTES[kv_dtype],
        "pool_bytes": run.pool_bytes,
        "grown_bytes": run.grown_bytes,
        "context_blocks": run.context_blocks,
        "prefill_seconds": run.seconds,
        "cached_tokens": [output.num_cached_tokens for output in run.answers],
        "streaming": streaming,
        **asdict(agreement),
        "failed": failures(context, run, agreement, kv_dtype),
    }


def main() -> None:
    """Prints the figures as JSON; ends with 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--kv-dtype", choices=list(LIMITS), default="float32")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(arguments.length, arguments.kv_dtype, Path(scratch))
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")
    sys.exit(bool(figures["failed"]))


if __name__ == "__main__":
    main()
