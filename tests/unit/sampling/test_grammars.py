"""Structured outputs in the sampling state: which tokens may come, judged by Python's own `re` and by prefixes."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagegraft.runtime.sampling import (
    Grammar,
    GrammarCompiler,
    Sampler,
    SamplingError,
    SamplingParams,
    SamplingParamsError,
    SamplingState,
    StructuredOutputsParams,
)
from pagegraft.runtime.text import Tokenizer

from tests.unit.text.small_tokenizers import MAKERS

ROOT = Path(__file__).parents[3]
END = 1
EXTRA = 5  # columns of the logits that are no tokens


@cache
def tokenizer(kind: str = "byte_level") -> Tokenizer:
    return Tokenizer(MAKERS[kind]())


@cache
def compiler(kind: str = "byte_level") -> GrammarCompiler:
    backend = tokenizer(kind)
    return GrammarCompiler(backend, vocab_size=backend.vocab_size + EXTRA, eos_token_ids=[END])


def state(grammar: Grammar, params: SamplingParams, output: list[int] | None = None, seed: int = 0) -> SamplingState:
    width = tokenizer().vocab_size + EXTRA
    return SamplingState(
        params, vocab_size=width, seed=seed, grammar=grammar, output_token_ids=output or [], eos_token_ids=[END]
    )


def allowed(sampling: SamplingState) -> set[int]:
    row = np.zeros(tokenizer().vocab_size + EXTRA, np.float32)
    sampling.edit(row)
    return set(np.flatnonzero(row == 0.0).tolist())


def walk(grammar: Grammar, params: SamplingParams, seed: int, most: int = 400) -> tuple[list[int], SamplingState]:
    """Samples from random logits until the end; the logits of longer texts are not favoured."""
    rng = np.random.default_rng(seed)
    sampling = state(grammar, params, seed=seed)
    tokens: list[int] = []
    while len(tokens) < most and not sampling.grammar.is_complete:
        result = Sampler().sample(rng.standard_normal((1, tokenizer().vocab_size + EXTRA)), [sampling])
        assert not result.errors
        tokens.append(int(result.token_ids[0]))
        sampling.append(tokens[-1])
        if tokens[-1] == END:
            break
    return tokens, sampling


def expression(rng: random.Random, depth: int) -> str:
    """A random regular expression of what Python and the library both read alike."""
    if depth == 0:
        return rng.choice(["a", "b", "th", "é", "😀", "[a-c]", "[^a-z]", " ", r"\.", "[0-9]", "the "])
    one, two = expression(rng, depth - 1), expression(rng, rng.randrange(depth))
    return rng.choice([f"{one}{two}", f"({one}|{two})", f"({one})?{two}", f"({one}){{1,3}}", f"({one})*{two}"])


def test_random_expressions_match_what_comes_of_them() -> None:
    rng = random.Random(0)
    texts, refused = set(), set()
    for seed in range(300):
        pattern = expression(rng, rng.randrange(5))
        params = StructuredOutputsParams(regex=pattern)
        try:
            grammar = compiler().compile(params)
        except SamplingParamsError as error:
            refused.add(str(error))
            continue
        sampling = SamplingParams(temperature=[0.0, 1.0][seed % 2], structured_outputs=params)
        tokens, after = walk(grammar, sampling, seed)
        text = tokenizer().decode(tokens)
        if tokens[-1] == END or after.grammar.is_complete:
            assert re.fullmatch(pattern, text, re.DOTALL), (pattern, text)
            texts.add(text)
    assert len(texts) > 100
    assert all("empty output" in reason for reason in refused)


def test_every_step_allows_what_can_become_a_choice_and_the_end_exactly_at_one() -> None:
    choices = ("a", "ab", "abc the", "the dog", "de(f", "é.", "😀😃")
    params = StructuredOutputsParams(choice=choices)
    grammar = compiler().compile(params)
    wanted = [choice.encode() for choice in choices]
    special = tokenizer().special_token_ids
    reached = set()
    for seed in range(150):
        sampling = state(grammar, SamplingParams(structured_outputs=params), seed=seed)
        tokens: list[int] = []
        rng = random.Random(seed)
        while True:
            text = b"".join(tokenizer().token_bytes(token) for token in tokens)
            if sampling.grammar.is_complete:
                assert text in wanted
                assert not any(other.startswith(text) and other != text for other in wanted)
                break
            may = allowed(sampling)
            assert may
            assert (END in may) == (text in wanted)
            assert not may & (special - {END})
            for token in may - {END}:
                assert token < tokenizer().vocab_size
                longer = text + tokenizer().token_bytes(token)
                assert len(longer) > len(text)
                assert any(choice.startswith(longer) for choice in wanted), (text, token)
            tokens.append(rng.choice(sorted(may)))
            sampling.append(tokens[-1])
            if tokens[-1] == END:
                break
        reached.add(text)
    assert reached == set(wanted)


def test_a_state_made_anew_from_its_tokens_goes_on_as_the_old_one() -> None:
    params = StructuredOutputsParams(json={"type": "array", "items": {"enum": ["the", 1, None]}, "maxItems": 4})
    grammar = compiler().compile(params)
    sampling = SamplingParams(structured_outputs=params)
    for seed in range(20):
        tokens, _ = walk(grammar, sampling, seed)
        old = state(grammar, sampling)
        for count, token in enumerate(tokens):
            assert allowed(old) == allowed(state(grammar, sampling, tokens[:count]))
            old.append(token)


def test_choices_of_a_request_follow_their_own_output() -> None:
    params = StructuredOutputsParams(choice=("ab", "cd"))
    grammar = compiler().compile(params)
    one, two = (state(grammar, SamplingParams(structured_outputs=params)) for _ in range(2))
    before = allowed(two)
    one.append(tokenizer().token_to_id("a"))
    assert allowed(two) == before
    assert allowed(one) == {tokenizer().token_to_id("b")}
    with pytest.raises(SamplingError, match="does not allow"):
        two.append(tokenizer().token_to_id("b"))


def test_the_end_yields_to_min_tokens_and_is_no_part_of_the_form_where_it_is_ignored() -> None:
    params = StructuredOutputsParams(regex="a*")
    grammar = compiler().compile(params)
    letter = tokenizer().token_to_id("a")
    assert END in allowed(state(grammar, SamplingParams(structured_outputs=params)))
    few = SamplingParams(structured_outputs=params, min_tokens=2)
    assert [END in allowed(state(grammar, few, [letter] * count)) for count in range(4)] == [False, False, True, True]
    ignoring = SamplingParams(structured_outputs=params, ignore_eos=True)
    assert END not in allowed(state(grammar, ignoring, [letter]))
    with pytest.raises(SamplingError):
        state(grammar, ignoring, [END])


def test_other_edits_come_on_top() -> None:
    params = StructuredOutputsParams(regex="[ab]+")
    grammar = compiler().compile(params)
    a, b = (tokenizer().token_to_id(letter) for letter in "ab")
    both = SamplingParams(structured_outputs=params, allowed_token_ids=[a, 40], bad_words_token_ids=[(a, a)])
    assert allowed(state(grammar, both)) == {a}
    nothing = state(grammar, both, [a])
    assert allowed(nothing) == set()
    assert "structured_outputs" in str(Sampler().sample(np.zeros((1, 430), np.float32)[:, :429], [nothing]).errors[0])
    biased = SamplingParams(structured_outputs=params, logit_bias={b: 50.0, 40: 100.0}, temperature=0)
    row = np.zeros((1, tokenizer().vocab_size + EXTRA), np.float32)
    assert Sampler().sample(row, [state(grammar, biased)]).token_ids.tolist() == [b]


def test_rows_without_a_form_are_what_they_are_alone() -> None:
    params = StructuredOutputsParams(regex="[ab]+")
    grammar = compiler().compile(params)
    logits = np.random.default_rng(0).standard_normal((6, tokenizer().vocab_size + EXTRA)).astype(np.float32)

    def free(row: int) -> SamplingState:
        return SamplingState(SamplingParams(), vocab_size=logits.shape[1], seed=row)

    kept = logits.copy()
    mixed = [free(r) if r % 2 else state(grammar, SamplingParams(structured_outputs=params), seed=r) for r in range(6)]
    together = Sampler().sample(logits, mixed).token_ids
    alone = [int(Sampler().sample(logits[r : r + 1], [free(r)]).token_ids[0]) for r in (1, 3, 5)]
    assert together[[1, 3, 5]].tolist() == alone
    assert np.array_equal(logits, kept)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "no constraint"),
        ({"json_object": False}, "no constraint"),
        ({"json": {}, "regex": "a"}, "json, regex"),
        ({"json": "{"}, "no JSON"),
        ({"json": "[1]"}, "a JSON schema"),
        ({"json": 3}, "a JSON schema"),
        ({"json": True}, "a JSON schema"),
        ({"json": {"x": {1, 2}}}, "no JSON"),
        ({"json": {"const": float("nan")}}, "no JSON"),
        ({"json": "[" * 100_000}, "deeply"),
        ({"json": {"enum": ["x" * 70_000]}}, "characters"),
        ({"json": {"properties": {"a": [{"multipleOf": 1_000_003}]}}}, "multipleOf"),
        ({"json": {"multipleOf": 0.9999983}}, "multipleOf"),
        ({"json": {"multipleOf": 1e300}}, "multipleOf"),
        ({"regex": ""}, "not empty"),
        ({"regex": 3}, "string"),
        ({"regex": "a" * 5000}, "characters"),
        ({"choice": ["a" * 40_000, "b" * 40_000]}, "characters"),
        ({"grammar": "start: /" + "a?" * 5000 + "/"}, "characters"),
        ({"json": {"items": {"pattern": "a?" * 5000}}}, "pattern"),
        ({"json": {"patternProperties": {"a?" * 5000: {}}}}, "pattern"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"choice": []}, "list of strings"),
        ({"choice": ["a", 1]}, "list of strings"),
        ({"grammar": 'start: %json {"type": "object"}'}, "%json"),
        ({"json_object": 1}, "json_object"),
    ],
)
def test_malformed_constraints_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SamplingParamsError, match=reason):
        StructuredOutputsParams(**given)


def test_constraints_from_fields() -> None:
    assert StructuredOutputsParams.from_fields({"choice": ["a"], "json": None}) == StructuredOutputsParams(
        choice=("a",)
    )
    for wrong in ([], {"json_schema": {}}, "a"):
        with pytest.raises(SamplingParamsError):
            StructuredOutputsParams.from_fields(wrong)
    with pytest.raises(SamplingParamsError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = GrammarCompiler(tokenizer(), vocab_size=500, eos_token_ids=[END])
    with pytest.raises(SamplingParamsError, match=r"pip install 'pagegraft\[guided\]'") as caught:
        fresh.compile(StructuredOutputsParams(json_object=True))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["word_piece", "unigram", "no_decoder"])
def test_tokenizers_that_do_not_spell_bytes_are_refused(kind: str) -> None:
    with pytest.raises(SamplingParamsError, match="whose tokens are bytes"):
        compiler(kind).compile(StructuredOutputsParams(json_object=True))


def test_a_model_without_an_end_ends_where_nothing_can_follow() -> None:
    fresh = GrammarCompiler(tokenizer(), vocab_size=tokenizer().vocab_size, eos_token_ids=[])
    params = StructuredOutputsParams(regex="ab?")
    sampling = state(fresh.compile(params), SamplingParams(structured_outputs=params))
    for letter, complete in (("a", False), ("b", True)):
        sampling.append(tokenizer().token_to_id(letter))
        assert sampling.grammar.is_complete == complete
        assert END not in np.flatnonzero(~sampling.grammar._allowed.banned_V)


def test_equal_constraints_are_compiled_once_and_few_are_kept() -> None:
    fresh = GrammarCompiler(tokenizer(), vocab_size=500, eos_token_ids=[END])
    first = fresh.compile(StructuredOutputsParams(json={"type": "object"}))
    assert fresh.compile(StructuredOutputsParams(json='{"type": "object"}')) is first
    for count in range(1, 20):
        fresh.compile(StructuredOutputsParams(regex=f"a{{{count}}}"))
    assert fresh.compile(StructuredOutputsParams(json={"type": "object"})) is not first


_HOSTILE = """
from pagegraft.runtime.sampling import GrammarCompiler, SamplingError, SamplingParamsError, StructuredOutputsParams
from pagegraft.runtime.text import Tokenizer
from tests.unit.text.small_tokenizers import MAKERS

def chain(link, count):
    parts = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{count}": {"type": "integer"}}}

def items(schema):
    for _ in range(20):
        schema = {"items": schema}
    return schema

hostile = [
    {"json": chain(lambda link: link, 1800)},
    {"json": chain(lambda link: {"allOf": [{"anyOf": [link]}]}, 1100)},
    {"json": chain(items, 240)},
    {"json": {"$ref": "#"}},
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1800)}}},
    {"json": {"type": "array", "items": {}, "minItems": 10**6, "maxItems": 10**8}},
    {"grammar": "\\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(600)), 'r600: "a"'])},
    {"grammar": "\\n".join(["start: T0", *(f'T{i}: "x" (T{i + 1} | "c")+ "b"' for i in range(280)), 'T280: "a"'])},
    {"grammar": "start: " + "(" * 4000 + '"a"' + ")" * 4000},
    {"grammar": "start: " + "|".join(['"a"'] * 2000)},
    {"grammar": "start: " + "%lark { start: " * 400 + '"a"' + "}" * 400},
    {"grammar": "start: /" + "a?" * 4000 + "/"},
    {"grammar": 'start: s\\ns: s s | "a" | '},
    {"regex": "(" * 2000 + "a" + ")" * 2000},
    {"regex": "a?" * 2000},
    {"regex": "(a|b)*a(a|b){3000}"},
    {"regex": "((a{1,1000}){1,1000}){1,1000}b"},
]
tokenizer = Tokenizer(MAKERS["byte_level"]())
compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[1])
for given in hostile:
    try:
        matcher = compiler.compile(StructuredOutputsParams(**given)).start(may_end=True)
        for token in [tokenizer.token_to_id(letter) for letter in "xaababab"]:
            matcher.append(token)
    except (SamplingParamsError, SamplingError) as error:
        assert len(str(error)) < 600, str(error)
print("survived")
"""


def test_hostile_constraints_end_neither_the_process_nor_its_patience() -> None:
    """In a process of its own: the library's recursion would overrun the stack, which nothing survives."""
    done = subprocess.run(
        [sys.executable, "-c", _HOSTILE], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.stdout == "survived\n", (done.returncode, done.stderr[-2000:])
