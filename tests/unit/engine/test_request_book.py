"""Counts of a request's choices and of what a step has to look for: right after every order of ends."""

from __future__ import annotations

import itertools

import pytest
from pagegraft.runtime.engine.cache_manager import CacheManager, GroupShape
from pagegraft.runtime.engine.errors import RequestError
from pagegraft.runtime.engine.request import ModelLimits, Request, RequestInput
from pagegraft.runtime.engine.request_book import RequestBook
from pagegraft.runtime.engine.scheduler import Scheduler
from pagegraft.runtime.sampling import BeamSearchParams, SamplingParams

LIMITS = ModelLimits(vocab_size=9, max_context=40, eos_token_ids=frozenset(), tokenizer=None)


def book() -> RequestBook:
    cache = CacheManager([GroupShape(None, 20)], 4, max_chunk=8)
    return RequestBook(Scheduler(cache, max_step_tokens=8, max_sequences=4), LIMITS)


def add(requests: RequestBook, params: SamplingParams | BeamSearchParams, name: str = "a") -> Request:
    return requests.add(RequestInput(request_id=name, prompt_token_ids=[1, 2], params=params))  # type: ignore[return-value]


def started(requests: RequestBook, n: int) -> Request:
    """A request of which all choices run."""
    request = add(requests, SamplingParams(n=n))
    plan = requests.scheduler.schedule()
    requests.scheduler.commit(plan)
    for choice in request.choices[1:]:
        requests.scheduler.fork(request.choices[0].sequence, choice.sequence)
    if n > 1:
        requests.set_forked(request)
    return request


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_request_ends_with_the_last_of_its_choices_whichever_that_is(order: tuple[int, ...]) -> None:
    requests = book()
    request = started(requests, 3)
    for left, index in zip((2, 1, 0), order, strict=True):
        for _ in range(2):  # ending it again counts nothing
            requests.end(request.choices[index], "stop")
        assert request.num_unfinished == left
        assert request.is_finished == (left == 0)
        assert requests.has_work == (left > 0)
        assert (request.finish_time is None) == (left > 0)
    assert requests.scheduler.cache.pools[0].num_owned == 0


def test_choices_that_never_started_end_with_the_first() -> None:
    requests = book()
    request = add(requests, SamplingParams(n=3))
    assert requests.num_unforked == 1
    requests.end(request.choices[0], "error", "why")
    assert request.is_finished
    assert [c.sequence.finish_reason for c in request.choices] == ["error"] * 3
    assert [c.error for c in request.choices] == ["why"] * 3
    assert requests.num_unforked == 0
    assert not requests.has_work


def test_an_abort_ends_the_choices_that_are_left() -> None:
    requests = book()
    request = started(requests, 3)
    requests.end(request.choices[1], "stop")
    assert requests.abort("a") is request
    assert [c.sequence.finish_reason for c in request.choices] == ["abort", "stop", "abort"]
    assert request.num_unfinished == 0
    assert requests.abort("a") is None


def test_what_a_step_looks_for_is_counted_and_forgotten() -> None:
    requests = book()
    add(requests, BeamSearchParams(beam_width=2, max_tokens=3), "beams")
    add(requests, SamplingParams(prompt_logprobs=1), "reported")
    add(requests, SamplingParams(n=2), "several")
    assert (requests.num_searches, requests.num_reported, requests.num_unforked) == (1, 1, 1)
    with pytest.raises(RequestError, match="in use"):
        add(requests, SamplingParams(prompt_logprobs=1), "reported")
    with pytest.raises(RequestError):
        requests.add(RequestInput(request_id="x", prompt_token_ids=[99], params=SamplingParams(n=2)))
    assert requests.num_requests == 3
    for name in ("beams", "reported", "several", "nobody"):
        requests.abort(name)
        requests.abort(name)
    assert (requests.num_searches, requests.num_reported, requests.num_unforked) == (0, 0, 0)
    assert requests.num_requests == 0
