"""Speculation changes nothing but the number of steps."""

from __future__ import annotations

import numpy as np
import pytest
from pagegraft.runtime.sampling import Sampler, SamplingError, SamplingParams, SamplingState
from pagegraft.runtime.sampling.speculative import reject_or_resample, verify_draft
from sampling_reference import chi_square

V = 30


def logits_after(tokens: list[int]) -> np.ndarray:
    """A model: logits from the last two tokens."""
    rng = np.random.default_rng([7, *tokens[-2:]])
    return (rng.standard_normal(V) * 2).astype(np.float32)


def new_state(params: SamplingParams, seed: int) -> SamplingState:
    return SamplingState(params, vocab_size=V, seed=seed, prompt_token_ids=[1, 2])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(top_k=5, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
    ],
)
def test_any_proposals_give_the_tokens_of_the_plain_run(params: SamplingParams) -> None:
    sampler, length = Sampler(), 40
    plain_state, plain = new_state(params, 5), list[int]()
    while len(plain) < length:
        plain += sampler.sample(logits_after(plain)[None], [plain_state]).token_ids.tolist()
        plain_state.append(plain[-1])
    rng = np.random.default_rng(1)
    state, tokens, steps = new_state(params, 5), list[int](), 0
    while len(tokens) < length:
        # Proposals that are right for a while and then are not.
        right = int(rng.integers(4))
        draft = plain[len(tokens) : len(tokens) + right] + rng.integers(V, size=int(rng.integers(3))).tolist()
        rows = np.stack([logits_after(tokens + draft[:i]) for i in range(len(draft) + 1)])
        verified = verify_draft(sampler, rows, state, draft)
        assert verified.error is None
        assert len(verified.logprobs) == (len(verified.token_ids) if params.logprobs else 0)
        tokens += verified.token_ids
        steps += 1
        assert state.num_output_tokens == len(tokens)
    assert tokens[:length] == plain
    assert steps < length * 2 / 3, "some proposals should have stood"


def test_an_error_keeps_the_tokens_before_it() -> None:
    rows = np.stack([logits_after([]), np.full(V, np.nan, np.float32)])
    state = new_state(SamplingParams(temperature=0), 0)
    verified = verify_draft(Sampler(), rows, state, [int(rows[0].argmax())])
    assert verified.token_ids == [int(rows[0].argmax())]
    assert verified.error is not None


def test_rows_must_match_the_proposals() -> None:
    with pytest.raises(SamplingError, match="2 proposed tokens need 3 rows of logits, not 1"):
        verify_draft(Sampler(), np.zeros((1, V), np.float32), new_state(SamplingParams(), 0), [1, 2])


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_rejection_keeps_the_target_distribution(overlap: float) -> None:
    rng = np.random.default_rng(2)
    target, other = rng.dirichlet(np.ones(8)), rng.dirichlet(np.full(8, 0.3))
    draft = overlap * target + (1 - overlap) * other
    draws, counts, stood = 30000, dict[int, int](), 0
    proposals = rng.choice(8, size=draws, p=draft)
    uniforms = rng.random((draws, 2))
    for proposal, pair in zip(proposals.tolist(), uniforms.tolist(), strict=True):
        token, accepted = reject_or_resample(target, draft, proposal, tuple(pair))
        counts[token] = counts.get(token, 0) + 1
        stood += accepted
    assert abs(chi_square(counts, dict(enumerate(target)), draws)) < 4
    assert abs(stood / draws - np.minimum(target, draft).sum()) < 0.01, "as often as is possible at all"


def test_a_proposal_out_of_nowhere_is_an_error() -> None:
    with pytest.raises(SamplingError, match="proposed with probability 0"):
        reject_or_resample(np.array([0.5, 0.5]), np.array([1.0, 0.0]), 1, (0.5, 0.5))
