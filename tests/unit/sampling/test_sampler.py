"""The sampler as a whole: order of processors, independence of the batch, log-probabilities, errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pagegraft.runtime.sampling import Sampler, SamplingError, SamplingParams, SamplingParamsError, SamplingState
from sampling_reference import chi_square, drawable, processed_logits

V = 12


def state(params: SamplingParams, *, seed: int = 0, vocab_size: int = V, **history: Any) -> SamplingState:
    return SamplingState(params, vocab_size=vocab_size, seed=seed, **history)


def sample(logits: np.ndarray, states: list[SamplingState]) -> list[int]:
    result = Sampler().sample(logits, states)
    assert not result.errors
    return result.token_ids.tolist()


def everything(rng: np.random.Generator, *, temperature: float) -> tuple[SamplingParams, dict[str, list[int]]]:
    """Random parameters of every kind, and a history for them."""
    allowed = sorted(rng.choice(V, size=9, replace=False).tolist())
    output = rng.integers(V, size=rng.integers(6)).tolist()
    history = {"prompt_token_ids": rng.integers(V, size=3).tolist(), "output_token_ids": output}
    bad = [(allowed[0],), (*output[-2:], allowed[1]), (output[-1] if output else 0, 3, 4)]
    params = SamplingParams(
        temperature=temperature,
        top_k=int(rng.choice([0, 4, 7])),
        top_p=float(rng.choice([1.0, 0.8])),
        min_p=float(rng.choice([0.0, 0.02])),
        presence_penalty=float(rng.choice([0.0, 0.7, -0.5])),
        frequency_penalty=float(rng.choice([0.0, 0.4])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        logit_bias={int(rng.integers(V)): 1.5, allowed[2]: -2.0} if rng.random() < 0.7 else None,
        allowed_token_ids=allowed if rng.random() < 0.6 else None,
        bad_words_token_ids=bad if rng.random() < 0.6 else (),
        min_tokens=int(rng.choice([0, 3])),
        stop_token_ids=[allowed[3]],
        ignore_eos=bool(rng.random() < 0.3),
    )
    return params, history


def test_greedy_takes_the_best_processed_logit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        params, history = everything(rng, temperature=0.0)
        logits = (rng.standard_normal((1, V)) * 2).astype(np.float32)
        scores = processed_logits(
            logits[0], params, prompt=history["prompt_token_ids"], output=history["output_token_ids"], eos=[2]
        )
        chosen = sample(logits, [state(params, eos_token_ids=[2], **history)])
        assert scores[chosen[0]] >= max(scores) - 1e-5, (params, history)


@pytest.mark.parametrize("number", range(8))
def test_draws_follow_the_docstring(number: int) -> None:
    """Every processor in its place: frequencies over many seeds against the reference's probabilities."""
    rng = np.random.default_rng(number)
    params, history = everything(rng, temperature=0.8)
    logits = (rng.standard_normal(V) * 2).astype(np.float32)
    scores = processed_logits(
        logits, params, prompt=history["prompt_token_ids"], output=history["output_token_ids"], eos=[2]
    )
    expected, _ = drawable(scores, params)
    draws = 3000
    states = [state(params, seed=seed, eos_token_ids=[2], **history) for seed in range(draws)]
    tokens = sample(np.tile(logits, (draws, 1)), states)
    counts = {token: tokens.count(token) for token in set(tokens)}
    assert set(counts) <= set(expected)
    assert len(expected) == 1 or abs(chi_square(counts, expected, draws)) < 4


@pytest.mark.parametrize(("ignore_eos", "token"), [(False, 5), (True, 2)])
def test_end_of_sequence_that_is_ignored_may_come_at_any_time(ignore_eos: bool, token: int) -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, [2, 5]] = 2.0, 1.0
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=ignore_eos)
    running = state(params, eos_token_ids=[2])
    for expected in (token, token, 2):
        assert sample(logits, [running]) == [expected]
        running.append(expected)


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = np.zeros((2, 5000), np.float32)
    logits[1, [70, 4000]] = 1.0
    greedy = SamplingParams(temperature=0)
    biased = replace(greedy, logit_bias={4999: 0.0})
    for params in (greedy, biased):
        assert sample(logits, [state(params, vocab_size=5000)] * 2) == [0, 70]


def mixed_batch(rng: np.random.Generator, rows: int, size: int) -> tuple[np.ndarray, list[SamplingParams]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.8, "temperature": 0.6},
        {"min_p": 0.05, "typical_p": 0.9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "top_p": 0.95},
        {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 3},
    ]
    logits = (rng.standard_normal((rows, size)) * 3).astype(np.float32)
    return logits, [SamplingParams(**kinds[row % len(kinds)]) for row in range(rows)]


@pytest.mark.parametrize("size", [50, 6000])
def test_a_row_does_not_depend_on_its_companions_or_its_place(size: int) -> None:
    rng = np.random.default_rng(1)
    logits, params = mixed_batch(rng, 24, size)
    history = [rng.integers(size, size=row).tolist() for row in range(24)]
    states = [
        state(p, seed=row, vocab_size=size, output_token_ids=history[row], prompt_token_ids=[1, 2])
        for row, p in enumerate(params)
    ]
    together = sample(logits, states)
    alone = [sample(logits[row : row + 1], [states[row]])[0] for row in range(24)]
    shuffled = rng.permutation(24)
    elsewhere = sample(logits[shuffled], [states[row] for row in shuffled])
    assert together == alone
    assert [together[row] for row in shuffled] == elsewhere
    assert sample(np.asfortranarray(logits), states) == together


def test_a_state_made_anew_goes_on_as_the_old_one() -> None:
    """What preemption needs: after any number of tokens, a state rebuilt from them continues the same way."""
    size, steps = 300, 40
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((steps, size)) * 3).astype(np.float32)
    params = SamplingParams(
        temperature=0.9, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, bad_words_token_ids=[(1, 2), (3,)]
    )
    options: dict[str, Any] = {"seed": 5, "sequence": 1, "vocab_size": size, "prompt_token_ids": [4, 5, 5]}
    running = state(params, **options)
    tokens: list[int] = []
    for step in range(steps):
        rebuilt = state(params, output_token_ids=tokens, **options)
        chosen = sample(logits[[step, step]], [running, rebuilt])
        assert chosen[0] == chosen[1]
        running.append(chosen[0])
        tokens.append(chosen[0])
    assert running.num_output_tokens == steps


def test_seeds_choices_and_positions_draw_differently() -> None:
    logits = np.zeros((1, 1000), np.float32)
    one = SamplingParams()

    def tokens(**options: Any) -> list[int]:
        running = state(one, vocab_size=1000, **options)
        result = []
        for _ in range(30):
            result.append(sample(logits, [running])[0])
            running.append(result[-1])
        return result

    base = tokens(seed=1)
    assert tokens(seed=1) == base
    assert len(set(base)) > 20
    for other in (tokens(seed=2), tokens(seed=-1), tokens(seed=1, sequence=1), tokens(seed=1 + 2**32)):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 3


def test_logits_are_left_alone() -> None:
    rng = np.random.default_rng(4)
    logits, params = mixed_batch(rng, 8, 500)
    logits.setflags(write=False)
    before = logits.copy()
    sample(logits, [state(p, vocab_size=500, output_token_ids=[1]) for p in params])
    np.testing.assert_array_equal(logits, before)


def test_half_precision_logits() -> None:
    logits = np.arange(V, dtype=np.float16)[None]
    assert sample(logits, [state(SamplingParams(temperature=0))]) == [V - 1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mask", [-np.inf, np.finfo(np.float32).min, -1e30])
@pytest.mark.parametrize(
    "shape", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.9}, {"logprobs": 5}]
)
def test_masked_tokens_are_never_drawn(mask: float, shape: dict[str, Any]) -> None:
    logits = np.full((200, V), mask, np.float32)
    logits[:, [3, 7]] = 30.0, 29.5
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, presence_penalty=1.0, **shape)
    states = [state(params, seed=row, prompt_token_ids=[0, 1], output_token_ids=[2]) for row in range(200)]
    assert set(sample(logits, states)) <= {3, 7}


@pytest.mark.parametrize("top", [0, 1, 5, -1])
def test_logprobs_are_of_the_raw_logits(top: int) -> None:
    rng = np.random.default_rng(5)
    size = 5000
    logits = np.round(rng.standard_normal((3, size)) * 4, 1).astype(np.float32)
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={7: 90.0}, logprobs=top)
    result = Sampler().sample(logits, [state(params, seed=row, vocab_size=size) for row in range(3)])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for row in range(3):
        report = result.logprobs[row]
        assert report.token_id == result.token_ids[row] == 7, "the bias decides, and the report does not show it"
        assert math.isclose(report.logprob, exact[row, 7], abs_tol=1e-4)
        assert report.rank == 1 + sum(logits[row] > logits[row, 7])
        ranked = sorted(range(size), key=lambda i: (-logits[row, i], i))[: size if top == -1 else top]
        assert report.top_token_ids.tolist() == ranked
        np.testing.assert_allclose(report.top_logprobs, exact[row, ranked], atol=1e-4)


def test_only_rows_that_ask_are_reported() -> None:
    logits = np.zeros((3, V), np.float32)
    states = [state(SamplingParams()), state(SamplingParams(logprobs=1)), state(SamplingParams(best_of=2, n=1))]
    assert set(Sampler().sample(logits, states).logprobs) == {1, 2}, "best_of ranks by log-probability"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2)])
def test_a_broken_row_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = np.zeros((3, V), np.float32)
    logits[1, 4] = bad
    result = Sampler().sample(logits, [state(params)] * 3)
    assert list(result.errors) == [1]
    assert isinstance(result.errors[1], SamplingError)
    assert result.token_ids[1] == -1
    assert min(result.token_ids[[0, 2]]) >= 0


def test_nothing_left_to_choose_is_an_error_of_the_row() -> None:
    params = SamplingParams(allowed_token_ids=[3], bad_words_token_ids=[(3,)])
    result = Sampler().sample(np.zeros((2, V), np.float32), [state(params), state(SamplingParams())])
    assert "leave no token to choose" in str(result.errors[0])
    assert result.token_ids[0] == -1
    assert result.token_ids[1] >= 0


def test_rows_and_states_must_match() -> None:
    with pytest.raises(SamplingError, match=r"shape \(2, 12\), but the step has 1 rows"):
        Sampler().sample(np.zeros((2, V), np.float32), [state(SamplingParams())])


def test_no_rows() -> None:
    assert Sampler().sample(np.zeros((0, V), np.float32), []).token_ids.tolist() == []


@pytest.mark.parametrize(
    "params",
    [{"allowed_token_ids": [V]}, {"stop_token_ids": [V]}, {"logit_bias": {V: 1.0}}, {"bad_words_token_ids": [(1, V)]}],
)
def test_ids_beyond_the_vocabulary(params: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError, match="holds token id 12, but the model's vocabulary ends at 11"):
        state(SamplingParams(**params))


def test_end_of_sequence_beyond_the_logits_is_harmless() -> None:
    """Some exports have fewer logits than the tokenizer has tokens."""
    assert sample(np.zeros((1, V), np.float32), [state(SamplingParams(min_tokens=2), eos_token_ids=[V + 5])])
