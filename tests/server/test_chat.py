"""Chats: messages, roles, tools and templates."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagegraft.runtime.text import Tokenizer
from served import Server, events, greedy, serve

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


@pytest.mark.parametrize("key", ["tools", "messages", "add_generation_prompt", "model", "self"])
def test_template_variables_with_names_of_fields_are_refused(server: Server, key: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {key: []}}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "chat_template_kwargs"


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


def refusal(server: Server, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json={"max_tokens": 1, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_choice_that_would_force_a_call_is_refused(server: Server, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = refusal(server, messages=MESSAGES, tools=tools, tool_choice=choice)
    assert error["param"] == "tool_choice"


@pytest.mark.parametrize(("choice", "tokens"), [("auto", 8), (None, 8), ("none", 7)])
def test_tools_are_in_the_prompt_unless_they_are_not_to_be_called(
    server: Server, choice: str | None, tokens: int
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": 1}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == tokens


@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_the_round_trip_of_a_tool_reaches_the_template_as_text(model: Path, content: dict[str, Any]) -> None:
    adds = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}a"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "1", "content": "yo"},
    ]
    for adding in serve(model, settings={"chat_template": adds}):
        body = {"messages": messages, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        response = adding.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == greedy("uhiatyoa", 5)


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "wizard", "content": "a"}, "wizard"),
        ({"role": None, "content": "a"}, "no role"),
        ({"role": "user", "content": None}, "null"),
        ({"role": "user", "content": 5}, "int"),
    ],
)
def test_messages_that_no_template_can_know_are_refused(server: Server, message: dict[str, Any], word: str) -> None:
    error = refusal(server, messages=[*MESSAGES, message])
    assert error["param"] == "messages"
    assert word in error["message"]
    assert "message 2" in error["message"]
