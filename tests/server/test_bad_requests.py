"""Requests that are refused: a status, a reason, the field at fault, and nothing left behind."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest
from served import Server, complete, greedy


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
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "image_url",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}},
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


@pytest.mark.parametrize("more", [{"n": 129}, {"best_of": 129}, {"n": 129, "use_beam_search": True}])
def test_too_many_choices_are_refused(server: Server, more: dict[str, Any]) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **more})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == next(iter(more))


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('{"prompt": "a",\n "n": }', "line 2, column 7"),
        ('{"prompt": "a"', "line 1, column 15"),
        ("prompt=a", "line 1, column 1"),
        ("", "empty"),
        ("[1]", "body"),
    ],
)
@pytest.mark.parametrize("headers", [{"content-type": "application/json"}, {}])
def test_what_is_not_json_is_told_with_the_place(
    server: Server, body: str, place: str, headers: dict[str, str]
) -> None:
    response = server.http.post("/v1/completions", content=body.encode(), headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert place in error["message"]
    assert ("not JSON" in error["message"]) == ("line" in place)


def test_a_body_is_json_without_a_header_that_says_so(server: Server) -> None:
    content = b'{"prompt": "a", "max_tokens": 1}'
    assert server.http.post("/v1/completions", content=content).status_code == 200
    kinds = [{"content-type": "application/x-www-form-urlencoded"}, {"origin": "http://elsewhere.invalid"}]
    for headers in kinds:  # as `curl -d` has it; as a page of another site can have it sent
        response = server.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 400, response.text
        assert "Content-Type" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": -1},
        {"temperature": 1e7},
        {"temperature": "hot"},
        {"max_tokens": 0},
        {"n": 0},
        {"n": 0, "use_beam_search": True},
        {"best_of": 0},
        {"best_of": 2, "temperature": 0},
        {"top_p": 1.5},
        {"frequency_penalty": 3},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"1": 101}},
        {"stop": [""]},
        {"stop_token_ids": [-1]},
        {"max_completion_tokens": 0},
        {"prompt": {}},
    ],
)
def test_a_value_out_of_range_is_told_with_its_field(server: Server, more: dict[str, Any]) -> None:
    path = "chat/completions" if "max_completion_tokens" in more else "completions"
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], **more}
    response = server.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == next(iter(more))
    assert error["param"] in error["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_bodies_have_a_size(server: Server, announced: bool) -> None:
    chunk = b" " * (1 << 20)
    body = b'{"prompt": "a", "max_tokens": 1}'
    for size, status in ((31, 200), (33, 413)):
        content = body + chunk * size if announced else itertools.chain([body], itertools.repeat(chunk, size))
        response = server.http.post("/v1/completions", content=content)
        assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "32 MiB" in error["message"]
    assert server.http.post("/v1/completions", content=body).status_code == 200
