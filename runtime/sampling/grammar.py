"""Outputs of a given form: which tokens may come next, by the `llguidance` library (an extra: `guided`).

A constraint is compiled once (`GrammarCompiler.compile`: outside of steps, it may take a while and may be refused); the
`Grammar` is shared, and each sequence follows it with a `GrammarMatcher` of its own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import SamplingError, SamplingParamsError
from .structured import StructuredOutputsParams

__all__ = ["Grammar", "GrammarCompiler", "GrammarMatcher", "TokenizerSource"]

_T = TypeVar("_T")

#: White space between the parts of a JSON document. Without a limit, small models write nothing else any more.
_JSON_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,40}"

#: The library's compiler recurses along a schema's references and a grammar's rules, 4 to 16 KiB each time: chains of
#: a thousand overrun a usual stack and end the process; as many as MAX_CONSTRAINT_CHARACTERS can spell fit here.
_STACK_BYTES: Final = 256 << 20
_stack_lock = threading.Lock()

#: A state of a lexer has 1 to 2 KiB.
_MAX_LEXER_STATES: Final = 20_000

#: What the library says where the grammar wants more and no token fits.
_DEAD_END: Final = "NoExtensionBias"

#: Compiled constraints that are kept: callers repeat themselves.
_KEPT: Final = 8


class TokenizerSource(Protocol):
    """What is wanted of a tokenizer: how many ids it has, and the content of its tokenizer.json."""

    vocab_size: int

    def to_json(self) -> str:
        """The content of the tokenizer.json."""


class Grammar:
    """A compiled constraint of one model's tokens. Immutable."""

    def __init__(self, prototype: Any, ends: list[int], vocabulary: _Vocabulary) -> None:
        self._prototype = prototype
        #: End-of-sequence, for rows of logits and for questions.
        self.ends_E = np.array(ends, np.int64)
        self.ends = frozenset(ends)
        self.vocabulary = vocabulary
        #: What may come first.
        self.first = Allowed(prototype, vocabulary)

    def start(self, *, may_end: bool) -> GrammarMatcher:
        """A matcher at the start of an output. `may_end`: end-of-sequence is allowed where the grammar accepts."""
        return GrammarMatcher(self, self._prototype.deep_copy, may_end=may_end)


class _Vocabulary:
    """Sizes of a model's rows and of the library's masks, and the ids that end an output there."""

    def __init__(self, size: int, library: Any) -> None:
        self.size = size
        self.num_words = (library.vocab_size + 31) // 32
        self.ends = np.array([t for t in library.eos_tokens if t < size], np.int64)


class Allowed:
    """What may follow in one state of a matcher.

    banned_V: True for tokens that may not; end-of-sequence is always one of them.
    accepts: the output so far is one that the grammar describes.
    is_complete: it is, and nothing may follow.

    Raises SamplingError when the library gave up.
    """

    __slots__ = ("accepts", "banned_V", "is_complete")

    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        words = np.zeros(vocabulary.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.accepts: bool = matcher.is_accepting()
        if matcher.is_error():
            raise SamplingError(f"there is no way on in the grammar: {_reason(matcher)}")
        np.invert(words, out=words)
        banned_V = np.unpackbits(words.view(np.uint8), count=vocabulary.size, bitorder="little")
        banned_V[vocabulary.ends] = 1
        self.banned_V: NDArray[np.bool_] = banned_V.view(np.bool_)
        self.is_complete = self.accepts and bool(self.banned_V.all())


class GrammarMatcher:
    """Follows one sequence's output.

    is_complete: the grammar accepts the output, and nothing but its end may follow.
    """

    __slots__ = ("_allowed", "_copy", "_grammar", "_matcher", "_may_end")

    def __init__(self, grammar: Grammar, copy: Callable[[], Any], *, may_end: bool) -> None:
        self._grammar = grammar
        self._allowed = grammar.first
        self._copy = copy
        self._matcher: Any = None  # until there is an output
        self._may_end = may_end

    @property
    def is_complete(self) -> bool:
        """See the class."""
        return self._allowed.is_complete

    def append(self, token_id: int) -> None:
        """Takes up one output token. Raises SamplingError for one not allowed, or when the library gives up."""
        if token_id in self._grammar.ends:
            if self._may_end and self._allowed.accepts:
                return  # the output ends here
            raise SamplingError(f"the grammar does not allow end-of-sequence, token {token_id}, here")
        if self._matcher is None:
            self._matcher = self._copy()
        if not self._matcher.consume_token(token_id):
            raise SamplingError(f"the grammar does not allow token {token_id} here: {_reason(self._matcher)}")
        self._allowed = Allowed(self._matcher, self._grammar.vocabulary)

    def apply(self, row_V: NDArray[np.float32]) -> None:
        """Makes the logits of all tokens that may not come next -inf."""
        allowed = self._allowed
        ends_E = self._grammar.ends_E
        kept_E = row_V[ends_E]
        np.copyto(row_V, -np.inf, where=allowed.banned_V)
        if self._may_end and allowed.accepts:
            row_V[ends_E] = kept_E


class GrammarCompiler:
    """Compiles constraints for one model's tokens; may be shared between threads.

    tokenizer: looked at with the first constraint; None refuses all of them.
    vocab_size: columns of the model's logits.
    eos_token_ids: allowed where the grammar accepts.
    """

    def __init__(self, tokenizer: TokenizerSource | None, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(t for t in eos_token_ids if t < vocab_size)
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._kept: dict[StructuredOutputsParams, Grammar] = {}

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a constraint.

        Raises SamplingParamsError, with the reason, for one that is malformed, unsupported, too large, or of which this
        model's tokens can spell nothing; and when the library is not installed or cannot read the tokenizer.
        """
        with self._lock:
            grammar = self._kept.get(params)
        if grammar is None:
            grammar = _with_deep_stack(lambda: self._compile(params))
            with self._lock:
                while len(self._kept) >= _KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[params] = grammar
        return grammar

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        library, tokens = _library(), self._library_tokens()
        try:
            text = _library_text(library, params)
        except ValueError as error:
            raise SamplingParamsError(f"structured_outputs cannot be compiled: {error}") from None
        limits = library.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = library.LLMatcher(tokens, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise SamplingParamsError(f"structured_outputs cannot be compiled: {_reason(matcher)}")
        try:
            grammar = Grammar(matcher, self._ends, _Vocabulary(self._vocab_size, tokens))
        except SamplingError as error:
            raise SamplingParamsError(f"structured_outputs cannot be compiled: {error}") from None
        if grammar.first.is_complete:
            raise SamplingParamsError("structured_outputs allows nothing but an empty output; correct it")
        return grammar

    def _library_tokens(self) -> Any:
        """The library's view of the tokenizer: made once, in about a third of a second for 50,000 tokens."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise SamplingParamsError(
                "structured outputs need a tokenizer and this model has none: copy the source model's tokenizer.json"
            )
        library = _library()
        with self._lock:
            if self._tokens is None:
                size = max(tokenizer.vocab_size, self._vocab_size)
                try:
                    self._tokens = library.LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=self._ends or None)
                except ValueError as error:
                    raise SamplingParamsError(
                        "structured outputs need a tokenizer whose tokens are bytes (byte-level, or with byte "
                        f"fallback); of this one llguidance says: {error!s:.300}"
                    ) from None
            return self._tokens


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise SamplingParamsError(
            "structured outputs need the llguidance library: pip install 'pagegraft[guided]'"
        ) from None
    return llguidance


def _library_text(library: Any, params: StructuredOutputsParams) -> str:
    """The constraint as the library takes it."""
    matcher = library.LLMatcher
    if params.regex is not None:
        text = matcher.grammar_from_regex(params.regex)
    elif params.choice is not None:
        text = matcher.grammar_from_regex("|".join(map(re.escape, params.choice)))
    elif params.grammar is not None:
        text = matcher.grammar_from_lark(params.grammar)
    else:
        schema = '{"type":"object"}' if params.json is None else params.json
        text = matcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _JSON_SPACE})
    return str(text)


def _reason(matcher: Any) -> str:
    """What the library says, as a line."""
    lines = [line.strip() for line in matcher.get_error().replace("<non-verbose/>", "").splitlines()]
    if lines and lines[0] == _DEAD_END:
        return "no token of this model spells what must come next"
    return " ".join(line for line in lines if line)[:400]


def _with_deep_stack(work: Callable[[], _T]) -> _T:
    """Does some work in a thread of its own with a stack that deep recursion does not overrun."""
    with ThreadPoolExecutor(1, "pagegraft-grammar") as pool:
        with _stack_lock:
            before = threading.stack_size(_STACK_BYTES)
            try:
                future = pool.submit(work)
            finally:
                threading.stack_size(before)
        return future.result()
