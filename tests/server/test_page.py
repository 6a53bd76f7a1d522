"""The chat page: what the server writes into it, and what it does in a browser where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, browser
from served import Server, greedy, serve

#: Texts of the bubbles with their kinds, in order.
BUBBLES = "[...document.querySelectorAll('#log > div')].map((each) => [each.className, each.textContent])"
ROLES = "messages.map((each) => each.role)"
#: Tokens of a context of 30 blocks.
CONTEXT = 121

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture
def small(model: Path) -> Iterator[Server]:
    """A server of which the first answer fills the context, so that the second turn fails."""
    yield from serve(model, settings={"num_blocks": 30})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def ask(page: Page, question: str) -> None:
    page.run("text.focus()")
    page.type(question)
    page.enter()


def answer(question: str) -> str:
    return greedy(f"u{question}a", CONTEXT - len(question) - 2)


def test_the_key_is_asked_for_where_one_is_wanted_and_names_are_text(model: Path) -> None:
    for key, name in ((None, "a<b>&c"), ("secret", "plain")):
        for server in serve(model, api_key=key, model_name=name):
            page = server.http.get("/").text
            assert "{{" not in page
            assert ('id="lock" hidden' in page) == (key is None)
            assert "secret" not in page
            assert ("a&lt;b&gt;&amp;c" in page) == (key is None)
            assert 'rel="icon" href="data:' in page


@needs_browser
def test_a_failed_turn_leaves_nothing_but_its_error(small: Server, page: Page) -> None:
    page.errors.clear()
    page.open(str(small.http.base_url))
    ask(page, "hello")
    page.wait("!running && messages.length")
    first = [["user", "hello"], ["assistant", answer("hello")]]
    assert page.run(BUBBLES) == first
    assert page.errors == []
    for _ in range(2):
        ask(page, "" if page.run("text.value") else "more")
        page.wait("!running && document.querySelector('.error')")
        *kept, (kind, error) = page.run(BUBBLES)
        assert kept == first
        assert kind == "error"
        assert f"a context of {CONTEXT}" in error
        assert page.run("text.value") == "more"
        assert page.run(ROLES) == ["user", "assistant"]


@needs_browser
def test_enter_does_not_end_an_answer_and_stop_does(small: Server, page: Page) -> None:
    page.open(str(small.http.base_url))
    small.runner.seconds = 0.05
    ask(page, "hello")
    page.wait("running && log.lastChild.textContent.length > 3")
    ask(page, "next")
    assert page.run("document.activeElement.id") == "text"
    small.runner.seconds = 0.0
    page.wait("!running")
    assert page.run(BUBBLES) == [["user", "hello"], ["assistant", answer("hello")]]
    assert page.run("text.value") == "next"
    small.runner.seconds = 0.05
    page.open(str(small.http.base_url))
    ask(page, "hello")
    page.wait("running && log.lastChild.textContent.length > 3")
    page.click("#send")
    page.wait("!running")
    [_, (kind, partial)] = page.run(BUBBLES)
    assert kind == "assistant"
    assert answer("hello").startswith(partial)
    assert len(partial) < len(answer("hello"))
    assert page.run(ROLES) == ["user", "assistant"]
    small.runner.seconds = 0.0
    small.wait_idle()


@needs_browser
def test_a_key_opens_the_page_and_is_not_kept(model: Path, page: Page) -> None:
    for keyed in serve(model, api_key="secret", settings={"num_blocks": 30}):
        page.open(str(keyed.http.base_url))
        ask(page, "hello")
        page.wait("!running && document.querySelector('.error')")
        assert page.run("document.activeElement.id") == "key"
        page.type("secret")
        page.enter()
        page.wait("!running && messages.length")
        assert page.run(BUBBLES) == [["user", "hello"], ["assistant", answer("hello")]]
        assert page.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_long_words_stay_in_the_window(small: Server, page: Page, width: int) -> None:
    page.open(str(small.http.base_url), width=width)
    ask(page, "hello")
    page.wait("!running && messages.length")
    assert page.run("document.documentElement.scrollWidth") <= width
    box = page.run("send.getBoundingClientRect().toJSON()")
    assert 0 < box["left"] < box["right"] <= width
