"""Structured outputs through the engine: they always have their form, whatever happens beside and to them."""

from __future__ import annotations

import json
import random
import re
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagegraft.custom_ops import main
from pagegraft.runtime import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from pagegraft.runtime.engine.request import RequestInput
from pagegraft.runtime.engine.sequence import Sequence
from pagegraft.runtime.sampling import SamplingParamsError

from tests.wiring import synthetic
from tests.wiring.forms import END, PERSON, build, is_person

REGEX = r"(ab|cd)+-[0-9]{2,4}(x|yy)*[.!]"
CHOICES = ("yes", "no", "yes, but", "é|ü (not)")
GRAMMAR = """
start: "(" outer ("," outer){0,3} ")"
outer: "a" | "[" inner ("," inner){0,2} "]"
inner: "a" | "[" "a" ("," "a"){0,2} "]"
"""
FORMS = {
    "json": StructuredOutputsParams(json=PERSON),
    "regex": StructuredOutputsParams(regex=REGEX),
    "choice": StructuredOutputsParams(choice=CHOICES),
    "grammar": StructuredOutputsParams(grammar=GRAMMAR),
}
Outcome = dict[tuple[tuple[int, ...], int], tuple[list[int], str, str | None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("structured"))


def nested(text: str) -> bool:
    """Whether brackets and commas are as the grammar of FORMS wants them."""
    before = None
    while before != text:
        before, text = text, re.sub(r"\[a(,a)*\]", "a", text)
    return re.fullmatch(r"\(a(,a)*\)", text) is not None


def judge(kind: str, text: str) -> bool:
    if kind == "json":
        return is_person(text)
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    return text in CHOICES if kind == "choice" else nested(text)


def jobs(count: int) -> list[tuple[str, list[int], SamplingParams]]:
    """Requests of every form with other ones between them; the prompts are all different."""
    kinds = [*FORMS, "free"]
    found = []
    for seed in range(count):
        kind = kinds[seed % len(kinds)]
        # The model's logits are steep: at these temperatures everything is said at times.
        params = SamplingParams(
            temperature=30.0 + 15 * (seed % 7),
            seed=seed,
            n=1 + (seed % 3 == 0),
            max_tokens=24 if kind == "free" else 900,
            structured_outputs=FORMS.get(kind),
            logprobs=1 if seed % 4 == 0 else None,
        )
        found.append((kind, [3 + seed % 200, 3 + seed // 200, 5, 7 + seed % 13], params))
    return found


def outcome(outputs: list[Any]) -> Outcome:
    return {
        (tuple(o.prompt_token_ids), c.index): (list(c.token_ids), c.text, c.finish_reason)
        for o in outputs
        for c in o.outputs
    }


def run(llm: LLM, work: list[tuple[str, list[int], SamplingParams]]) -> Outcome:
    prompts: Any = [{"prompt_token_ids": prompt} for _, prompt, _ in work]
    return outcome(llm.generate(prompts, [params for _, _, params in work]))


def test_outputs_have_their_form_undisturbed_and_through_preemption_and_wrong_guesses(model: Path) -> None:
    work = jobs(250)
    with LLM(model, num_blocks=2000, block_size=4, max_num_seqs=16) as llm:
        expected = run(llm, work)
        free = run(llm, [job for job in work if job[0] == "free"])
        assert free.items() <= expected.items()  # with nobody beside them they say the same
    kinds = {tuple(prompt): kind for kind, prompt, _ in work}
    for (prompt, _), (tokens, text, reason) in expected.items():
        if kinds[prompt] != "free":
            assert reason == "stop", (kinds[prompt], text, len(tokens))
            assert judge(kinds[prompt], text), (kinds[prompt], text)
    assert len({text for _, text, _ in expected.values()}) > 150  # they are not all the same
    longest = {prompt: len(tokens) for (prompt, _), (tokens, _, _) in reversed(expected.items())}
    fitting = [
        (kind, prompt, params if kind == "free" else replace(params, max_tokens=200))
        for kind, prompt, params in work
        if longest[tuple(prompt)] < 150
    ]
    fitting_prompts = [prompt for _, prompt, _ in fitting]
    rng = random.Random(1)
    offered = [0]

    def guess(sequence: Sequence, limit: int) -> array[int]:
        """What will come, with errors: other tokens, and the end of the output where it may not be."""
        if not sequence.owner.request.forked or sequence.num_tokens == sequence.num_prompt_tokens:
            return array("i")
        prompt = tuple(sequence.tokens[: sequence.num_prompt_tokens])
        tokens = expected[prompt, sequence.index][0][sequence.num_tokens - sequence.num_prompt_tokens :][:limit]
        tokens = [t if rng.random() < 0.8 else rng.choice([END, 40, 300]) for t in tokens]
        offered[0] += len(tokens)
        return array("i", tokens)

    settings: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 40}
    with LLM(model, num_speculative_tokens=4, debug=True, **settings) as llm:
        llm.engine.scheduler.guess = guess
        assert run(llm, fitting) == {key: expected[key] for key in expected if list(key[0]) in fitting_prompts}
        assert llm.engine.scheduler.counters.preemptions > 5
        assert offered[0] > 500


def test_best_of_and_stop_strings_and_cuts(model: Path) -> None:
    with LLM(model, num_blocks=2000, block_size=4) as llm:
        form = FORMS["json"]
        best = SamplingParams(temperature=50, seed=1, n=2, best_of=4, max_tokens=900, structured_outputs=form)
        texts = [c.text for c in llm.generate("Hi", best)[0].outputs]
        assert len(texts) == 2
        assert all(map(is_person, texts))
        stopped = SamplingParams(temperature=50, seed=1, max_tokens=900, structured_outputs=form, stop='"age"')
        output = llm.generate("Hi", stopped)[0].outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", '"age"')
        assert '"name"' in output.text
        assert '"age"' not in output.text
        cut = SamplingParams(temperature=50, seed=1, max_tokens=5, structured_outputs=form)
        output = llm.generate("Hi", cut)[0].outputs[0]
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 5


def test_the_end_comes_where_nothing_can_follow_and_only_where_the_form_is_complete(model: Path) -> None:
    """Also at the very limit, before min_tokens, and where end-of-sequence does not end."""
    with LLM(model, num_blocks=2000, block_size=4) as llm:
        one = StructuredOutputsParams(regex="ab")
        base: dict[str, Any] = {"temperature": 50, "seed": 3}
        plain = llm.generate("Hi", SamplingParams(**base, max_tokens=20, structured_outputs=one))[0].outputs[0]
        assert (plain.text, plain.finish_reason, END in plain.token_ids) == ("ab", "stop", False)
        count = len(plain.token_ids)
        for more in ({"max_tokens": count}, {"min_tokens": 15, "max_tokens": 20}, {"ignore_eos": True}):
            output = llm.generate("Hi", SamplingParams(**{**base, **more}, structured_outputs=one))[0].outputs[0]
            assert (output.text, output.finish_reason) == ("ab", "stop"), more
        many = StructuredOutputsParams(regex="(ab)*")
        endings = set()
        for seed in range(60):
            params = SamplingParams(temperature=50, seed=seed, min_tokens=4, max_tokens=6, structured_outputs=many)
            output = llm.generate("Hi", params)[0].outputs[0]
            tokens = list(output.token_ids)
            assert END not in tokens[:4]
            if output.finish_reason == "stop":
                assert tokens[-1] == END
                assert re.fullmatch("(ab)*", output.text)
            endings.add(output.finish_reason)
            ignoring = SamplingParams(temperature=50, seed=seed, ignore_eos=True, max_tokens=9, structured_outputs=many)
            output = llm.generate("Hi", ignoring)[0].outputs[0]
            assert (len(output.token_ids), output.finish_reason) == (9, "length")
            assert re.fullmatch("(ab)*a?", output.text)
        assert endings == {"stop", "length"}


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_tokenizers_of_pieces_with_byte_fallback(tmp_path: Path, kind: str) -> None:
    folder = build(tmp_path, kind)
    prompts = [f"Text number {i}" for i in range(40)]
    with LLM(folder, num_blocks=3000, block_size=4) as llm:
        for name, form in FORMS.items():
            each = [
                SamplingParams(temperature=60, seed=seed, max_tokens=900, structured_outputs=form) for seed in range(40)
            ]
            for output in llm.generate(prompts, each):
                assert output.outputs[0].finish_reason == "stop"
                assert judge(name, output.outputs[0].text), output.outputs[0].text


def test_a_form_that_other_parameters_forbid_is_an_error_of_its_request_alone(model: Path) -> None:
    with LLM(model, num_blocks=2000, block_size=4) as llm:
        banned = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]), allowed_token_ids=[END])
        good = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]))
        outputs = llm.generate(["a", "b"], [banned, good])
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "structured_outputs" in (outputs[0].outputs[0].error or "")
        assert outputs[1].outputs[0].text == "yes"


def test_what_cannot_be_compiled_is_refused_before_anything_runs(model: Path, tmp_path: Path) -> None:
    with LLM(model, num_blocks=200, block_size=4) as llm:
        for form, reason in (
            ({"regex": "(a"}, "unclosed group"),
            ({"json": {"type": "strange"}}, "strange"),
            ({"grammar": 'begin: "a"'}, "start"),
            ({"json": {"$ref": "http://127.0.0.1:9/none"}}, "127.0.0.1"),
            ({"regex": "(?:)"}, "empty output"),
        ):
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
            with pytest.raises(SamplingParamsError, match=reason):
                llm.generate(["a", "b"], [SamplingParams(), params])
            assert not llm.engine.has_work
        params = SamplingParams(structured_outputs=FORMS["json"])
        with pytest.raises(SamplingParamsError, match="not compiled"):
            llm.engine.add(RequestInput(request_id="x", prompt_token_ids=[1], params=params))
        with pytest.raises(TypeError):
            BeamSearchParams(structured_outputs=FORMS["json"])  # type: ignore[call-arg]
    bare = synthetic.build(tmp_path / "bare")
    with LLM(bare, num_blocks=64) as llm, pytest.raises(SamplingParamsError, match=r"tokenizer\.json"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(structured_outputs=FORMS["json"]))
    letters = synthetic.add_text(synthetic.build(tmp_path / "letters"))
    with LLM(letters, num_blocks=64) as llm:
        with pytest.raises(SamplingParamsError, match="no token of this model"):
            llm.generate("a", SamplingParams(structured_outputs=FORMS["json"]))
        word = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-c]{5}"))
        assert re.fullmatch("[a-c]{5}", llm.generate("a", word)[0].outputs[0].text)


def generate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs the command; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["pagegraft", "generate", *arguments, "--kv-memory", "1MB"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    return int(caught.value.code or 0)


def test_the_command_takes_a_schema_or_an_expression(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "person.json"
    schema.write_text(json.dumps(PERSON))
    common = (str(model), "-p", "Hi", "--max-tokens", "500", "--temperature", "50", "--seed", "1")
    assert generate(monkeypatch, *common, "--json-schema", str(schema)) == 0
    assert is_person(capsys.readouterr().out)
    assert generate(monkeypatch, *common, "--regex", "[ab]{5}!") == 0
    assert re.fullmatch("[ab]{5}!\n", capsys.readouterr().out)
    for wrong, reason in (
        (("--regex", "(a"), "unclosed group"),
        (("--regex", "a", "--json-schema", str(schema)), "exactly one"),
        (("--json-schema", str(tmp_path / "none.json")), "none.json"),
    ):
        assert generate(monkeypatch, *common, *wrong) == 1
        told = capsys.readouterr().err
        assert reason in told
        assert told.count("\n") == 1


def test_schemas_are_kept_as_text_that_later_changes_do_not_reach() -> None:
    schema = {"type": "object"}
    form = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert json.loads(str(form.json)) == {"type": "object"}
    assert form == StructuredOutputsParams(json='{ "type": "object" }')
