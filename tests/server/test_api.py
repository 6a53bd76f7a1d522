"""The OpenAI interface: bodies in, JSON and streams out, metrics, models and health."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagegraft.runtime.sampling import TokenLogprobs
from pagegraft.runtime.server.responses import chat_logprobs, completion_logprobs
from served import Server, complete, events, greedy, serve

from tests.wiring.synthetic import letters


def test_completion(server: Server) -> None:
    answer = complete(server, model="synthetic", prompt="hello", max_tokens=12)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "logprobs": None, "text": greedy("hello", 12), "finish_reason": "length", "stop_reason": None}
    ]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 12, 17)


def test_cached_tokens_are_in_the_usage(server: Server) -> None:
    counts = [
        complete(server, prompt="cachedpromptoftokens", max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert counts == [0, 16]
    salted = complete(server, prompt="cachedpromptoftokens", max_tokens=2, cache_salt="x")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("prompts", [["ab", "cde", "f"], [letters("ab"), letters("cde"), letters("f")]])
def test_several_prompts_with_several_choices_are_numbered(server: Server, prompts: list[Any]) -> None:
    answer = complete(server, prompt=prompts, n=2, temperature=1.0, seed=1, max_tokens=4)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    for index, text in enumerate(["ab", "cde", "f"]):
        alone = complete(server, prompt=text, n=2, temperature=1.0, seed=1, max_tokens=4)
        pair = answer["choices"][2 * index : 2 * index + 2]
        assert [c["text"] for c in pair] == [c["text"] for c in alone["choices"]]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 24


def test_echo_and_logprobs(server: Server) -> None:
    answer = complete(server, prompt="abc", max_tokens=3, echo=True, logprobs=2)["choices"][0]
    assert answer["text"] == "abc" + greedy("abc", 3)
    shown = answer["logprobs"]
    assert "".join(shown["tokens"]) == answer["text"]
    assert len(shown["token_logprobs"]) == 6
    assert shown["token_logprobs"][0] is None
    assert shown["top_logprobs"][0] is None
    assert shown["text_offset"][:4] == [0, 1, 2, 3]
    for token, value, top in list(zip(*(shown[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True))[
        1:
    ]:
        assert top[token] == value
        assert len(top) in (2, 3)


def test_stop_strings_and_beams(server: Server) -> None:
    text = greedy("stop", 12)
    answer = complete(server, prompt="stop", max_tokens=12, stop=text[4:6])["choices"][0]
    assert answer["text"] == text[: text.index(text[4:6])]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", text[4:6])
    beams = complete(server, prompt="beam", use_beam_search=True, n=2, best_of=3, max_tokens=4)["choices"]
    assert len({b["text"] for b in beams}) == 2


def test_a_streamed_completion_adds_up_and_has_one_usage_chunk(server: Server) -> None:
    chunks = events(
        server, "/v1/completions", prompt="hello", max_tokens=12, stream_options={"include_usage": True}, logprobs=1
    )
    *parts, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert all(p["usage"] is None for p in parts)
    assert "".join(p["choices"][0]["text"] for p in parts) == greedy("hello", 12)
    assert [p["choices"][0]["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["length"]
    tokens = [t for p in parts if p["choices"][0]["logprobs"] for t in p["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == greedy("hello", 12)
    assert all("usage" not in c for c in events(server, "/v1/completions", prompt="hello", max_tokens=3))


def test_streams_of_several_prompts_and_choices_are_merged(server: Server) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 6}
    whole = [c["text"] for c in complete(server, **body)["choices"]]
    texts = [""] * 4
    for chunk in events(server, "/v1/completions", **body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == whole


def test_models_page_and_health(server: Server) -> None:
    models = server.http.get("/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("synthetic", 1201)]
    assert server.http.get("/v1/models/synthetic").json() == models[0]
    unknown = server.http.get("/v1/models/some/other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    health = server.http.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    page = server.http.get("/")
    assert "synthetic" in page.text
    assert "/v1/chat/completions" in page.text


def test_an_api_key_is_wanted_where_set(model: Path) -> None:
    for keyed in serve(model, api_key="secret"):
        assert keyed.http.get("/v1/models").status_code == 401
        assert keyed.http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert keyed.http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert keyed.http.get("/health").status_code == 200


def metric(text: str, name: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    assert lines, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_metrics_have_vllms_names_and_count(server: Server) -> None:
    before = server.http.get("/metrics").text
    complete(server, prompt="metrics", max_tokens=7)
    after = server.http.get("/metrics").text

    def gained(name: str) -> float:
        old = metric(before, name) if name + "{" in before else 0.0
        return metric(after, name) - old

    assert gained("vllm:prompt_tokens_total") == 7
    assert gained("vllm:generation_tokens_total") == 7
    assert gained("vllm:request_success_total") == 1
    assert gained("vllm:time_to_first_token_seconds_count") == 1
    assert gained("vllm:e2e_request_latency_seconds_count") == 1
    assert gained("vllm:prefix_cache_queries_total") == 7
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert metric(after, name) == 0
    for name in ("vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"):
        assert metric(after, name) >= 0


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_have_the_offsets_of_the_whole_text(server: Server, echo: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 9, "echo": echo, "logprobs": 1}
    whole = complete(server, **body)["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(server, "/v1/completions", **body)]
    for key in ("tokens", "text_offset"):
        assert [each for part in parts if part for each in part[key]] == whole[key]


def test_logprobs_of_impossible_tokens_are_json() -> None:
    top = np.array([-0.0, -np.inf], np.float32)
    entry = TokenLogprobs(token_id=1, logprob=-math.inf, rank=2, top_token_ids=np.array([0, 1]), top_logprobs=top)
    for shown in (completion_logprobs([1], [entry], str, 0), chat_logprobs([entry], str)):
        assert "-9999.0" in json.dumps(shown, allow_nan=False)
    assert completion_logprobs([], [], str, 7)["text_offset"] == []
