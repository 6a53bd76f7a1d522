"""What sampling and detokenising cost, on one core.

    python tests/performance/sampling_bench.py [--vocab 49152] [--rows 8] [--json]

Times are processor time, the best of several rounds, in microseconds a row (or a token): other work on the machine can
only add to them.
Rows are of three kinds: "peaked" like those of a language model in the middle of a word, "open" like those at a place
where much may follow, "flat" (standard normal logits) like no model's, as the hardest case.
"""

from __future__ import annotations

import argparse
import json
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
from pagegraft.runtime.sampling import Sampler, SamplingParams, SamplingState
from pagegraft.runtime.text import TextStream, Tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.8": {"top_p": 0.8},
    "top_p 0.5": {"top_p": 0.5},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9},
}
ROUNDS = 5
POSITIONS = 12


def rows(kind: str, count: int, vocab: int) -> np.ndarray:
    """Logits [count, vocab] of one kind; see the top of the file."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((count, vocab)).astype(np.float32)
    if kind == "flat":
        return logits
    # Zipf's law: the r-th likeliest token has a probability of about 1 / r ** exponent.
    exponent = 2.0 if kind == "peaked" else 1.1
    ranks = np.argsort(np.argsort(-logits, axis=1), axis=1) + 1
    return (-exponent * np.log(ranks) + 0.1 * logits).astype(np.float32)


def best_time(function: Callable[[], object]) -> float:
    """Seconds of one call, the best of several rounds of about 20 ms."""
    once = min(timeit.repeat(function, number=1, repeat=3))
    number = max(1, int(0.02 / max(once, 1e-7)))
    return min(timeit.repeat(function, timer=time.process_time, number=number, repeat=ROUNDS)) / number


def sampling_times(count: int, vocab: int) -> dict[str, dict[str, float]]:
    """Case -> kind of rows -> microseconds a row, mean over positions: with top_p, a draw may take another look."""
    times: dict[str, dict[str, float]] = {}
    sampler = Sampler()
    for kind in ("peaked", "open", "flat"):
        logits = rows(kind, count, vocab)
        for case, values in CASES.items():
            states = [
                SamplingState(SamplingParams(**values), vocab_size=vocab, seed=row, prompt_token_ids=range(500))
                for row in range(count)
            ]
            total = 0.0
            positions = POSITIONS if 0.0 < states[0].params.top_p < 1.0 else 1
            for _ in range(positions):
                total += best_time(lambda logits=logits, states=states: sampler.sample(logits, states))
                for state in states:
                    state.append(1)
            times.setdefault(case, {})[kind] = total / positions / count * 1e6
    return times


def text_times() -> dict[str, float]:
    """Microseconds a token of a byte-level tokenizer's stream, without and with stop strings."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = "The quick brown fox jumps over the lazy dog while nobody is looking at either of them. " * 40
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode(text)

    def run(params: SamplingParams) -> None:
        stream = TextStream(tokenizer, params)
        for token_id in ids:
            stream.push(token_id)
        stream.finish()

    cases = {"detokenise": (), "detokenise, 2 stop strings": ("\n\nUser:", "</s>")}
    return {
        name: best_time(lambda stop=stop: run(SamplingParams(stop=stop))) / len(ids) * 1e6
        for name, stop in cases.items()
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # A process that has loaded a model has freed large blocks; malloc then stops giving memory back after each array.
    np.empty(1 << 24, np.uint8).fill(0)
    sampling, text = sampling_times(options.rows, options.vocab), text_times()
    if options.json:
        print(json.dumps({"vocab": options.vocab, "rows": options.rows, "sampling_us": sampling, "text_us": text}))
        return
    print(f"sampling, us a row of {options.vocab} float32 logits, {options.rows} rows")
    print(f"{'':30s}{'peaked':>9s}{'open':>9s}{'flat':>9s}")
    for case, by_kind in sampling.items():
        print(f"{case:30s}" + "".join(f"{value:9.1f}" for value in by_kind.values()))
    print("text, us a token")
    for case, value in text.items():
        print(f"{case:30s}{value:9.2f}")


if __name__ == "__main__":
    main()
