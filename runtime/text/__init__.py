"""Text: tokenizer, incremental detokenisation, stops, chat templates."""

from pagegraft.runtime.text.chat_template import ChatTemplate
from pagegraft.runtime.text.detokenizer import IncrementalDetokenizer
from pagegraft.runtime.text.errors import ChatTemplateError, TokenizerError
from pagegraft.runtime.text.model_text import ModelText
from pagegraft.runtime.text.stop import FinishReason, StopChecker, StopHit, StopStrings
from pagegraft.runtime.text.stream import TextStream
from pagegraft.runtime.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "FinishReason",
    "IncrementalDetokenizer",
    "ModelText",
    "StopChecker",
    "StopHit",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
]
