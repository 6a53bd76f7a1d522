"""The OpenAI interface: bodies in, JSON and streams out, errors by status."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pagegraft.runtime.sampling import TokenLogprobs
from pagegraft.runtime.server.responses import chat_logprobs, completion_logprobs
from pagegraft.runtime.server.serving import _Merged
from pagegraft.runtime.text import Tokenizer
from served import Server, serve

from tests.wiring.synthetic import continuation, letters, spell


def greedy(prompt: str, count: int) -> str:
    return spell(continuation(letters(prompt), count))


def complete(server: Server, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Server, path: str, **body: Any) -> list[Any]:
    """The data of a stream's events; the last must be [DONE]."""
    body = {"temperature": 0, "ignore_eos": True, "stream": True, **body}
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


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


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}]


def test_chat(server: Server) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2}).json()
    choice = answer["choices"][0]
    expected = greedy("uhiayoa", 5)
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": expected}
    assert "".join(t["token"] for t in choice["logprobs"]["content"]) == expected
    assert all(len(t["top_logprobs"]) == 2 for t in choice["logprobs"]["content"])
    assert answer["usage"]["prompt_tokens"] == 7
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = server.http.post("/v1/chat/completions", json={**body, "tools": tools}).json()
    assert with_tools["usage"]["prompt_tokens"] == 8


def test_a_streamed_chat_is_the_transcript_that_clients_expect(server: Server) -> None:
    chunks = events(
        server, "/v1/chat/completions", messages=MESSAGES, max_tokens=5, stream_options={"include_usage": True}
    )
    first, *parts, end, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert "".join(p["choices"][0]["delta"]["content"] for p in parts) == greedy("uhiayoa", 5)
    assert end["choices"][0] == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
        "delta": {},
        "stop_reason": None,
    }
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 12


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/completions", {"prompt": ["a", ""]}, 400, "empty"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "does not exist"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/completions", {"prompt": [61]}, 400, "token id 61"),
        ("/v1/completions", {"prompt": "a" * 1300}, 400, "1300 tokens"),
        ("/v1/completions", {"prompt": "a" * 1300, "stream": True}, 400, "1300 tokens"),
        ("/v1/completions", {"prompt": "a", "n": 1, "best_of": 2, "stream": True, "temperature": 1}, 400, "best_of"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, 400, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "u", "content": "a"}], "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
    ],
)
def test_bad_requests_have_a_status_and_a_reason(
    server: Server, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["type"]
    server.wait_idle()


def test_models_page_and_health(server: Server) -> None:
    models = server.http.get("/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("synthetic", 1201)]
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


def test_an_overload_is_refused_with_429(model: Path) -> None:
    for small in serve(model, settings={"max_unfinished": 1}):
        small.runner.seconds = 0.05
        with small.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 300, "stream": True}) as s:
            lines = s.iter_lines()  # kept: the connection closes with it
            next(lines)
            response = small.http.post("/v1/completions", json={"prompt": "a"})
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
        small.runner.seconds = 0.0
        small.wait_idle()


def test_a_timeout_ends_a_request(model: Path) -> None:
    for short in serve(model, request_timeout=0.1):
        short.runner.seconds = 0.02
        answer = complete(short, prompt="a", max_tokens=1000)["choices"][0]
        assert answer["finish_reason"] == "timeout"
        assert greedy("a", 60).startswith(answer["text"])


def test_a_stalled_step_turns_health_red_and_its_end_green_again(model: Path) -> None:
    for stalled in serve(model, stall_seconds=0.7):
        stalled.runner.seconds = 1.5
        thread = threading.Thread(target=complete, args=(stalled,), kwargs={"prompt": "a", "max_tokens": 1})
        thread.start()
        time.sleep(1.1)
        response = stalled.http.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "stalled")
        thread.join()
        stalled.wait_idle()
        assert stalled.http.get("/health").status_code == 200


def _goes_away(server: Server, body: dict[str, Any], after: int) -> None:
    """Sends a request and closes the connection: after some lines of a stream, or at once."""
    with httpx.Client(base_url=server.http.base_url, timeout=30) as client:
        if body.get("stream"):
            with client.stream("POST", "/v1/completions", json=body) as response:
                for _, _ in zip(range(after), response.iter_lines(), strict=False):
                    pass
            return
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.15)


@pytest.mark.parametrize("state", ["queued", "prompt", "output"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_everything_at_once(model: Path, state: str, stream: bool) -> None:
    for slow in serve(model):
        slow.runner.seconds = 0.03
        prompt = "p" * 400 if state == "prompt" else "ab"
        body = {"prompt": [prompt] * (9 if state == "queued" else 1), "max_tokens": 700, "ignore_eos": True}
        _goes_away(slow, {**body, "stream": stream}, 4)
        slow.wait_idle(3.0)
        slow.runner.seconds = 0.0
        assert complete(slow, prompt="after", max_tokens=3)["choices"][0]["text"] == greedy("after", 3)


@pytest.mark.parametrize("key", ["tools", "messages", "add_generation_prompt", "model", "self"])
def test_template_variables_with_names_of_fields_are_refused(server: Server, key: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {key: []}}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "chat_template_kwargs"


def post_raw(server: Server, body: str) -> httpx.Response:
    return server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})


def test_lone_surrogates_break_nothing(server: Server) -> None:
    response = post_raw(server, '{"prompt": "a", "model": "\\ud800"}')
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
    response = post_raw(server, '{"prompt": "\\ud800"}')
    assert response.status_code == 400, response.text
    response = post_raw(server, '{"prompt": "a", "stop": "\\ud800", "temperature": 0}')
    assert response.status_code in (200, 400), response.text
    response = post_raw(server, '{"prompt": "a", "cache_salt": "\\ud800", "temperature": 0}')
    assert response.status_code == 200, response.text
    assert complete(server, prompt="ab", max_tokens=4)["choices"][0]["text"] == greedy("ab", 4)
    server.wait_idle()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/v1/completions", '{"prompt"', 400, "JSON"),
        ("POST", "/v1/chat/completions", "[" * 100_000, 400, "body"),
        ("POST", "/v1/completions", '{"prompt": ' + "9" * 5000 + "}", 400, "body"),
        ("POST", "/v1/nothing", "{}", 404, "Not Found"),
        ("DELETE", "/v1/completions", "", 405, "Method Not Allowed"),
    ],
)
def test_what_the_framework_refuses_has_the_shape_of_an_error(
    server: Server, method: str, path: str, body: str, status: int, message: str
) -> None:
    response = server.http.request(method, path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("completions", {"logprobs": 21}),
        ("completions", {"logprobs": -1}),
        ("completions", {"stop": ["ab" * 1000, "cd" * 1049]}),
        ("completions", {"bad_words": ["ab" * 2049]}),
        ("chat/completions", {"top_logprobs": 21}),
        ("chat/completions", {"stop": "a" * 4097}),
    ],
)
def test_what_takes_memory_without_bounds_is_refused(server: Server, path: str, more: dict[str, Any]) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "logprobs": path != "completions", **more}
    response = server.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == next(iter(more))


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


def test_a_conversation_that_takes_long_to_read_holds_up_nobody(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, reading, others_answered = Tokenizer.encode, threading.Event(), threading.Event()

    def slow(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
        reading.set()
        others_answered.wait(60)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(httpx.post, f"{server.http.base_url}/v1/chat/completions", json=body, timeout=90)
        try:
            assert reading.wait(20)
            assert server.http.get("/health").status_code == 200
            assert not answer.done()
        finally:
            others_answered.set()
        assert answer.result().status_code == 200


@pytest.mark.parametrize("more", [{"n": 129}, {"best_of": 129}, {"n": 129, "use_beam_search": True}])
def test_too_many_choices_are_refused(server: Server, more: dict[str, Any]) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **more})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == next(iter(more))


def test_a_stream_that_is_not_read_is_not_queued() -> None:
    async def main() -> None:
        made = 0

        async def outputs() -> AsyncIterator[Any]:
            nonlocal made
            for made in range(1, 101):
                yield made

        merged = _Merged([outputs(), outputs()])
        for _ in range(50):
            await asyncio.sleep(0)
        assert made <= 2
        read = 0
        while await merged.next() is not None:
            read += 1
        assert read == 200
        await merged.close()

    asyncio.run(main())
