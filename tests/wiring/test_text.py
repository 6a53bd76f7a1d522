"""Text in and out of LLM: prompts, chats, streams, echoes, stops; failures of single rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.runtime import LLM, BeamSearchParams, SamplingParams
from pagegraft.runtime.model.runner import Feeds
from pagegraft.runtime.model.session import OnnxRunner

from tests.wiring import synthetic
from tests.wiring.synthetic import continuation, letters, spell

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.add_text(synthetic.build(tmp_path_factory.mktemp("text")))


def test_prompts_of_text_are_answered_in_their_order(model: Path) -> None:
    texts = ["hello", "a", "another", "zz"]
    with LLM(model, num_blocks=64, max_num_seqs=2) as llm:
        outputs = llm.generate(texts, GREEDY)
    assert [output.prompt for output in outputs] == texts
    assert [output.outputs[0].text for output in outputs] == [spell(continuation(letters(t), 10)) for t in texts]


def test_chats_are_rendered_by_the_models_template(model: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    with LLM(model, num_blocks=64) as llm:
        one = llm.chat(chat, GREEDY)
        two = llm.chat([chat, [{"role": "system", "content": "b"}, *chat]], GREEDY, tools=[{"name": "f"}])
    assert one[0].outputs[0].text == spell(continuation(letters("uhia"), 10))
    expected = [spell(continuation(letters(text), 10)) for text in ("uhita", "sbuhita")]
    assert [output.outputs[0].text for output in two] == expected


def test_streamed_text_only_grows_and_never_shows_what_a_stop_string_takes_away(model: Path) -> None:
    whole = spell(continuation(letters("stream"), 30))
    stop = whole[17:20]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    with LLM(model, num_blocks=64) as llm:
        texts = [output.outputs[0].text for output in llm.stream("stream", params)]
        last = llm.generate("stream", params)[0].outputs[0]
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert texts[-1] == last.text == whole[: whole.index(stop)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    # The tokens end with the one that completed the stop string.
    assert spell(list(last.token_ids[:-1])) != whole
    assert stop in spell(list(last.token_ids))
    assert stop not in spell(list(last.token_ids[:-1]))


def test_echo_gives_the_prompt_back(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, echo=True)
    with LLM(model, num_blocks=64) as llm:
        outputs = llm.generate(["abc", {"prompt_token_ids": letters("abc")}], params)
    assert {output.outputs[0].text for output in outputs} == {"abc" + spell(continuation(letters("abc"), 4))}


def test_bad_words_are_not_said(model: Path) -> None:
    # A prompt that is continued with one letter: the tokenizer spells a pair of letters with two tokens.
    prompt, said = next((w, t) for w in "abcdefgh" if len(t := spell(continuation(letters(w), 1))) == 1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, bad_words=[said])
    with LLM(model, num_blocks=64) as llm:
        assert llm.generate(prompt, GREEDY)[0].outputs[0].text.startswith(said)
        assert not llm.generate(prompt, params)[0].outputs[0].text.startswith(said)


class NotANumber(OnnxRunner):
    """Gives NaN for the rows of sequences whose newest token is 25, as a broken weight might."""

    def execute(self, feeds: Feeds) -> np.ndarray:
        logits = super().execute(feeds).copy()
        logits[feeds["input_ids"][feeds["logits_indices"]] == 25] = np.nan
        return logits


def test_a_row_without_a_distribution_ends_its_request_alone(model: Path) -> None:
    runner = NotANumber(model, Manifest.load(model))
    texts = ["abc", "xyz", "d"]
    with LLM(model, num_blocks=64, runner=runner, debug=True) as llm:
        outputs = llm.generate(texts, GREEDY)
        beams = llm.generate("xyz", BeamSearchParams(beam_width=2, max_tokens=3))[0].outputs[0]
        assert (beams.finish_reason, beams.token_ids) == ("error", [])
    for text, output in zip(texts, outputs, strict=True):
        choice, expected = output.outputs[0], continuation(letters(text), 10)
        if 25 in (letters(text)[-1], *expected[:-1]):
            assert choice.finish_reason == "error"
            assert "distribution" in (choice.error or "")
        else:
            assert list(choice.token_ids) == expected
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "length" in {output.outputs[0].finish_reason for output in outputs}
