"""Beam search against exhaustive search and a plain reading of its rules, on tiny random models."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from pagegraft.runtime.sampling import BeamSearchParams
from pagegraft.runtime.sampling.beam import BeamHypothesis, BeamSearch, beam_candidates

EOS, STOP = 0, 1


class TinyModel:
    """Logits that depend on the last token and on the length."""

    def __init__(self, rng: np.random.Generator, vocab: int, length: int) -> None:
        self.logits = (rng.standard_normal((length + 1, vocab + 1, vocab)) * 1.5).astype(np.float32)
        exact = self.logits.astype(np.float64)
        self.logprobs = exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))

    def row(self, ids: tuple[int, ...]) -> np.ndarray:
        return self.logits[len(ids), ids[-1] if ids else -1]

    def logprob(self, ids: tuple[int, ...]) -> float:
        return sum(self.logprobs[i, ids[i - 1] if i else -1, token] for i, token in enumerate(ids))


def search(model: TinyModel, params: BeamSearchParams, *, max_output_tokens: int = 100) -> list[BeamHypothesis]:
    beams = BeamSearch(params, eos_token_ids=[EOS], max_output_tokens=max_output_tokens)
    live: list[tuple[int, ...]] = [()]
    while not beams.is_finished:
        assert beams.num_live == len(live)
        rows = np.stack([model.row(ids) for ids in live])
        step = beams.advance(*beam_candidates(rows, beams.num_candidates))
        live = [(*live[parent], token) for parent, token in zip(step.parents, step.token_ids, strict=True)]
    return beams.best()


def all_outputs(vocab: int, length: int, ends: set[int]) -> list[tuple[int, ...]]:
    """Everything that can be generated: an end comes last, and only what has one may be shorter than the limit."""
    outputs = []
    for size in range(1, length + 1):
        for ids in itertools.product(range(vocab), repeat=size):
            ended = ids[-1] in ends
            if not ends & set(ids[:-1]) and (ended or size == length):
                outputs.append(ids)
    return outputs


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
def test_wide_enough_beams_find_the_best_of_all(length_penalty: float) -> None:
    vocab, length = 4, 4
    for seed in range(10):
        model = TinyModel(np.random.default_rng(seed), vocab, length)
        params = BeamSearchParams(
            beam_width=300, n=5, max_tokens=length, length_penalty=length_penalty, stop_token_ids=[STOP]
        )
        found = search(model, params)
        scores = {
            ids: model.logprob(ids) / len(ids) ** length_penalty for ids in all_outputs(vocab, length, {EOS, STOP})
        }
        best = sorted(scores, key=lambda ids: -scores[ids])[:5]
        assert [beam.token_ids for beam in found] == best
        for beam in found:
            assert math.isclose(beam.score, scores[beam.token_ids], rel_tol=1e-5)
            assert math.isclose(beam.cumulative_logprob, model.logprob(beam.token_ids), rel_tol=1e-5)
            ended = beam.token_ids[-1] in (EOS, STOP)
            assert beam.finish_reason == ("stop" if ended else "length")
            assert beam.stop_reason == (STOP if beam.token_ids[-1] == STOP else None)


def plain_beam_search(model: TinyModel, vocab: int, params: BeamSearchParams, ends: set[int]) -> list[tuple[int, ...]]:
    """The rules of `BeamSearch` over the whole vocabulary, always run to the limit (early stopping aside)."""
    width, live = params.beam_width, [()]
    finished: dict[tuple[int, ...], float] = {}

    def keep_best() -> None:
        for ids in sorted(finished, key=lambda ids: -finished[ids])[width:]:
            del finished[ids]

    for length in range(1, params.max_tokens + 1):
        ranked = sorted(((*ids, token) for ids in live for token in range(vocab)), key=lambda ids: -model.logprob(ids))
        for rank, ids in enumerate(ranked):
            if ids[-1] in ends and rank < width:
                finished[ids] = model.logprob(ids) / length**params.length_penalty
        keep_best()
        live = [ids for ids in ranked if ids[-1] not in ends][:width]
        if params.early_stopping and len(finished) == width and length < params.max_tokens:
            live = []
            break
    for ids in live:
        finished[ids] = model.logprob(ids) / len(ids) ** params.length_penalty
    keep_best()
    return sorted(finished, key=lambda ids: -finished[ids])[: params.n]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_narrow_beams_follow_the_rules(width: int, early_stopping: bool) -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        model = TinyModel(rng, 7, 6)
        params = BeamSearchParams(
            beam_width=width,
            n=width,
            max_tokens=6,
            length_penalty=float(rng.choice([0.0, 0.6, 1.0, 1.5])),
            early_stopping=early_stopping,
            stop_token_ids=[STOP] if rng.random() < 0.5 else [],
        )
        ends = {EOS, *params.stop_token_ids}
        assert [beam.token_ids for beam in search(model, params)] == plain_beam_search(model, 7, params, ends)


def test_one_beam_is_greedy() -> None:
    model = TinyModel(np.random.default_rng(1), 9, 8)
    params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    ids: tuple[int, ...] = ()
    while len(ids) < 8:
        ids = (*ids, int(model.row(ids).argmax()))
    assert [beam.token_ids for beam in search(model, params)] == [ids]


def test_the_context_limits_the_output() -> None:
    model = TinyModel(np.random.default_rng(2), 9, 8)
    params = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)
    (best,) = search(model, params, max_output_tokens=3)
    assert len(best.token_ids) == 3
    assert best.finish_reason == "length"


def test_it_stops_when_nothing_better_can_come() -> None:
    """With both beams ended and a hopeless rest, no further step is asked for."""
    params = BeamSearchParams(beam_width=2, n=2, max_tokens=50, length_penalty=0.0, stop_token_ids=[STOP])
    beams = BeamSearch(params, eos_token_ids=[EOS], max_output_tokens=50)
    step = beams.advance(np.array([[EOS, STOP, 2, 3]]), np.log([[0.5, 0.4, 0.06, 0.04]]))
    assert beams.is_finished
    assert step.parents == ()
    assert [beam.token_ids for beam in beams.best()] == [(EOS,), (STOP,)]


def test_impossible_tokens_are_no_candidates() -> None:
    params = BeamSearchParams(beam_width=3, n=3, max_tokens=1)
    beams = BeamSearch(params, eos_token_ids=[EOS], max_output_tokens=9)
    beams.advance(np.array([[4, 5, 6]]), np.array([[-0.1, -np.inf, -np.inf]]))
    assert [beam.token_ids for beam in beams.best()] == [(4,)]


def test_candidates_are_the_likeliest_with_their_logprobs() -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((2, 6000)).astype(np.float32)
    ids, logprobs = beam_candidates(logits, 4)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for row in range(2):
        assert ids[row].tolist() == np.argsort(-logits[row])[:4].tolist()
        np.testing.assert_allclose(logprobs[row], exact[row, ids[row]], rtol=1e-5)
