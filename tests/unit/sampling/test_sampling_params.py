"""What SamplingParams accepts, refuses and takes over from a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from pagegraft.runtime.sampling import BeamSearchParams, SamplingParams, SamplingParamsError


def test_lists_become_tuples_and_strings_sequences() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, np.int64(2)], bad_words_token_ids=[[1, 2]], top_k=-1)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words_token_ids == ((1, 2),)
    assert params.top_k == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 5  # type: ignore[misc]


def test_bias_keys_may_be_strings_as_json_has_them() -> None:
    assert SamplingParams(logit_bias={"5": 1, 6: -100}).logit_bias == {5: 1.0, 6: -100.0}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number, not 'hot'"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0.0 and at most 1.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2; it must be at least 0"),
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"typical_p": 0}, "typical_p is 0"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": 1e308}, r"repetition_penalty is 1e\+308"),  # infinite in float32
        ({"repetition_penalty": 1e-320}, "repetition_penalty is 1e-320"),  # nothing in float32
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"temperature": 1e308}, r"temperature is 1e\+308; it must be at least 0.0 and at most 1000000.0"),
        ({"n": 0}, "n is 0; it must be at least 1"),
        ({"n": 3, "best_of": 2}, "best_of is 2; it must be at least 3"),
        ({"best_of": 2, "temperature": 0}, "best_of 2 with temperature 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be at least 0 and at most 4"),
        ({"logprobs": -2}, "logprobs is -2"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"stop": [""]}, "stop holds ''"),
        ({"stop": [5]}, "stop holds 5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids holds an empty sequence"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\] is 101"),
        ({"logit_bias": {"a": 1}}, "logit_bias has the key 'a'"),
    ],
)
def test_refusals_name_field_value_and_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 2, "n": 3}, "n is 3; it must be at least 1 and at most 2"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"length_penalty": float("inf")}, "length_penalty must be a finite number"),
    ],
)
def test_beam_search_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        BeamSearchParams(**values)


def test_greedy_and_number_of_sequences() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=3, best_of=5).num_sequences == 5


def test_defaults_of_the_model_under_the_caller() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 77, "eos_token_id": 2}
    params = SamplingParams.from_generation_config(config, top_p=0.5)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.5, 0, 77)
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).is_greedy
    assert SamplingParams.from_generation_config({"do_sample": False}, temperature=0.5).temperature == 0.5
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    with pytest.raises(SamplingParamsError, match="'temprature' is unknown"):
        SamplingParams.from_generation_config({}, temprature=1)


def test_bad_words_become_ids_with_and_without_a_space_before() -> None:
    ids = {"dog": [7, 8], " dog": [9], "the": [3], " the": [3]}
    params = SamplingParams(bad_words=["dog", "the"]).with_bad_word_ids(ids.__getitem__)
    assert params.bad_words_token_ids == ((7, 8), (9,), (3,))
    assert params.bad_words == ()
