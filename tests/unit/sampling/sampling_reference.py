"""The sampler's docstring in plain float64, one token at a time: what the fast one is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pagegraft.runtime.sampling import SamplingParams


def processed_logits(
    logits: NDArray[np.float32],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> list[float]:
    """Steps 1 to 6."""
    scores = [float(value) for value in logits]
    for token in range(len(scores)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = -math.inf
        for *prefix, last in params.bad_words_token_ids:
            if token == last and prefix == list(output[len(output) - len(prefix) :]):
                scores[token] = -math.inf
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
        if len(output) < params.min_tokens and token in ends:
            scores[token] = -math.inf
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        count = list(output).count(token)
        scores[token] -= params.frequency_penalty * count
        scores[token] -= params.presence_penalty if count else 0.0
    return scores


def smallest_set(order: Sequence[int], probabilities: dict[int, float], mass: float) -> tuple[list[int], float]:
    """The shortest beginning of `order` that reaches `mass`, and how near the decision was."""
    total, nearest = 0.0, math.inf
    for length, token in enumerate(order, start=1):
        total += probabilities[token]
        nearest = min(nearest, abs(total - mass))
        if total >= mass:
            return list(order[:length]), nearest
    return list(order), nearest


def drawable(scores: Sequence[float], params: SamplingParams) -> tuple[dict[int, float], float]:
    """Steps 8 to 12: token -> probability, and how near to another result a sum came."""
    scaled = {token: score / params.temperature for token, score in enumerate(scores) if score > -math.inf}
    best = max(scaled.values())
    weights = {token: math.exp(value - best) for token, value in scaled.items()}
    nearest = math.inf

    def normalised(tokens: Sequence[int]) -> dict[int, float]:
        total = sum(weights[token] for token in tokens)
        return {token: weights[token] / total for token in sorted(tokens)}

    kept = [token for token in scaled if weights[token] >= params.min_p]
    nearest = min([nearest, *(abs(weights[token] - params.min_p) for token in scaled if params.min_p)])
    ranked = sorted(kept, key=lambda token: (-scaled[token], token))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        ranked, near = smallest_set(ranked, normalised(ranked), params.top_p)
        nearest = min(nearest, near)
    if params.typical_p < 1.0:
        probabilities = normalised(ranked)
        information = {token: -math.log(p) if p else math.inf for token, p in probabilities.items()}
        entropy = sum(p * information[token] for token, p in probabilities.items() if p)
        ranked = sorted(ranked, key=lambda token: (round(abs(information[token] - entropy), 5), token))
        ranked, near = smallest_set(ranked, probabilities, params.typical_p)
        nearest = min(nearest, near)
    return normalised(ranked), nearest


def chi_square(counts: dict[int, int], probabilities: dict[int, float], draws: int) -> float:
    """(statistic - degrees) / sqrt(2 degrees): about standard normal when the draws follow the probabilities."""
    cells = [(counts.get(token, 0), p * draws) for token, p in probabilities.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [cell for cell in cells if cell[1] < 5]
    if rest:
        large.append((sum(c for c, _ in rest), sum(e for _, e in rest)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in large if expected > 0)
    degrees = len(large) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)
