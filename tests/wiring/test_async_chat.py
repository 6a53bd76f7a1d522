"""AsyncLLM with conversations, and how it is imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pagegraft.runtime import AsyncLLM, SamplingParams
from pagegraft.runtime.text import ChatTemplateError, Tokenizer

from tests.wiring.synthetic import add_text, build, continuation, letters, spell

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
CHAT = [{"role": "user", "content": "hello"}]


def test_a_conversation_is_read_outside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_text(build(tmp_path))
    encode, readers = Tokenizer.encode, []

    def watched(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
        readers.append(threading.current_thread())
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)

    async def main() -> None:
        llm = AsyncLLM(folder, num_blocks=64)
        output = [each async for each in llm.chat(CHAT, GREEDY, tools=[{"name": "f"}])][-1]
        assert output.outputs[0].text == spell(continuation(letters("uhellota"), 40))
        with pytest.raises(ChatTemplateError):
            await anext(llm.chat([]))
        await llm.shutdown()

    asyncio.run(main())
    assert len(readers) == 1
    assert readers[0] is not threading.current_thread()


def test_leaving_a_chat_ends_its_request(tmp_path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(add_text(build(tmp_path)), num_blocks=64)
        chat = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=800, ignore_eos=True))
        await anext(chat)
        await chat.aclose()
        async with asyncio.timeout(20):
            while llm.stats().num_unfinished:
                await asyncio.sleep(0.01)
        await llm.shutdown()

    asyncio.run(main())


def test_the_package_names_it_and_imports_it_when_it_is_wanted() -> None:
    program = (
        "import sys, pagegraft.runtime as runtime\n"
        "assert 'pagegraft.runtime.async_engine' not in sys.modules\n"
        "assert 'AsyncLLM' in runtime.__all__\n"
        "from pagegraft.runtime import AsyncLLM\n"
        "assert AsyncLLM.__module__ == 'pagegraft.runtime.async_engine'\n"
        "assert 'fastapi' not in sys.modules\n"
        "assert not hasattr(runtime, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
