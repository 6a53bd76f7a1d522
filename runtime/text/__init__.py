"""Text: tokenizer, incremental detokenisation, stops, chat templates."""

from .chat_template import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .errors import ChatTemplateError, TokenizerError
from .model_text import ModelText
from .stop import FinishReason, StopChecker, StopHit, StopStrings
from .stream import TextStream
from .tokenizer import Tokenizer

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
