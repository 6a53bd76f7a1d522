"""Structured outputs over HTTP: response_format and structured_outputs, their refusals, and who is not held up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import Server, serve

from tests.wiring.forms import PERSON, build, is_person

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 700, "temperature": 50}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ODD = {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = build(tmp_path_factory.mktemp("structured"))
    yield from serve(folder, settings={"num_blocks": 2000, "max_num_batched_tokens": 64})


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_schemas_of_both_endpoints(server: Server) -> None:
    for seed in range(8):
        answer = post(server, "/v1/chat/completions", **CHAT, seed=seed, n=2, response_format=SCHEMA)
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            assert is_person(choice["message"]["content"])
        body = {"prompt": ["a", "b"], "max_tokens": 700, "temperature": 50, "seed": seed, "response_format": SCHEMA}
        assert all(is_person(choice["text"]) for choice in post(server, "/v1/completions", **body)["choices"])
    loose = {"type": "json_schema", "json_schema": {"schema": {"enum": [{"a": [1, 2]}]}}}
    answer = post(server, "/v1/chat/completions", **CHAT, seed=1, response_format=loose)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": [1, 2]}


def test_any_object(server: Server) -> None:
    found = 0
    for seed in range(12):
        answer = post(server, "/v1/chat/completions", **CHAT, seed=seed, response_format={"type": "json_object"})
        choice = answer["choices"][0]
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
            found += 1
    assert found > 2


def test_a_stream_adds_up_to_a_document(server: Server) -> None:
    body = {**CHAT, "seed": 5, "response_format": SCHEMA, "stream": True}
    lines = server.http.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert is_person(text)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]+!"}, "[a-f]{3}-[0-9]+!"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" ("," "b"){2}'}, "a,b,b"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json_object": True, "json": None}, r"\{[^\0]*"),
    ],
)
def test_vllms_field(server: Server, form: dict[str, Any], pattern: str) -> None:
    text = post(server, "/v1/completions", prompt="x", max_tokens=200, structured_outputs=form)["choices"][0]["text"]
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "json_schema"),
        ({"response_format": {}}, "None"),
        ({"response_format": {"type": "json_schema"}}, "no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "a"}}}, "no schema"),
        ({"response_format": ODD}, "odd"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}, "stream": True},
            "odd",
        ),
        ({"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, "exclude each other"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp"),
        ({"structured_outputs": {"choice": ["a"]}, "use_beam_search": True}, "beam search"),
    ],
)
def test_refusals(server: Server, body: dict[str, Any], reason: str) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "x", **body})
    assert response.status_code == 400, response.text
    assert reason in response.json()["error"]["message"]
    server.wait_idle()


def test_text_needs_nothing(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 5, "temperature": 0}
    plain = post(server, "/v1/completions", **body)["choices"]
    assert post(server, "/v1/completions", **body, response_format={"type": "text"})["choices"] == plain


def test_others_say_the_same_beside_structured_requests(server: Server) -> None:
    free = {"prompt": "free", "max_tokens": 40, "temperature": 40, "seed": 3, "ignore_eos": True}
    alone = post(server, "/v1/completions", **free)["choices"]
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(post, server, "/v1/chat/completions", **CHAT, seed=seed, response_format=SCHEMA)
            for seed in range(12)
        ]
        others = [pool.submit(post, server, "/v1/completions", **free) for _ in range(4)]
        assert all(is_person(job.result()["choices"][0]["message"]["content"]) for job in jobs)
        assert all(other.result()["choices"] == alone for other in others)
