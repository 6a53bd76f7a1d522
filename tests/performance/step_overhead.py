"""What a step costs beside the session run: schedule, feeds, binding, sampling, text and commit, on one core.

    python -m tests.performance.step_overhead [--json -]

Runs the synthetic model with a small vocabulary (work of the vocabulary's size is not counted here) and subtracts the
time inside onnxruntime. Prints microseconds a step by number of decoding sequences, and a least-squares fit
`fixed + per_sequence * S`. Targets: 60 us and 3 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.request import RequestInput
from pagegraft.runtime.model.session import OnnxRunner

from tests.wiring import synthetic


class _TimedSession:
    """Passes everything on and adds up the time inside `run_with_iobinding`."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.seconds = 0.0

    def run_with_iobinding(self, binding: Any) -> None:
        start = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self.seconds += time.perf_counter() - start


def _with_tokenizer(folder: Path) -> Path:
    """Byte-level text, as most models have it."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet[: synthetic.VOCAB])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def measure(folder: Path, sequences: int, steps: int) -> float:
    """Median microseconds beside the run, of steps in which `sequences` sequences decode."""
    runner = OnnxRunner(folder, Manifest.load(folder), num_threads=1)
    session = _TimedSession(runner._session)
    runner._session = session
    with LLM(folder, num_blocks=sequences * 40, block_size=16, max_num_seqs=max(8, sequences), runner=runner) as llm:
        params = SamplingParams(temperature=0, max_tokens=steps + 40, ignore_eos=True)
        for i in range(sequences):
            llm.engine.add(RequestInput(request_id=str(i), prompt_token_ids=[i % 50, 3, i // 50], params=params))
        for _ in range(20):
            llm.engine.step()
        costs = []
        for _ in range(steps):
            inside, start = session.seconds, time.perf_counter()
            llm.engine.step()
            costs.append(time.perf_counter() - start - (session.seconds - inside))
    # The mean of the middle half: a block boundary, every 16th token of each sequence, is part of the cost.
    middle = sorted(costs)[steps // 4 : -steps // 4]
    return statistics.fmean(middle) * 1e6


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="- for standard output")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    counts = (1, 8, 32, 64, 128)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _with_tokenizer(synthetic.build(Path(scratch) / "model"))
        costs = {count: measure(folder, count, arguments.steps) for count in counts}
    slope, fixed = np.polyfit(list(costs), list(costs.values()), 1)
    figures = {"fixed_us": float(fixed), "per_sequence_us": float(slope), "step_us": costs}
    if arguments.json:
        text = json.dumps(figures, indent=2)
        print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")
        return
    for count, cost in costs.items():
        print(f"{count:5d} sequences  {cost:8.1f} us  (target {60 + 3 * count} us)")
    print(f"fit: {fixed:.1f} us + {slope:.2f} us a sequence")


if __name__ == "__main__":
    main()
