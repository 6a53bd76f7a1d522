"""Runs converted models: block pool, block tables, continuous batching, sampling, streaming, server."""

from typing import TYPE_CHECKING, Any

from ..custom_ops import __version__
from .config import EngineConfig
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import BeamSearchParams, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from .async_engine import AsyncLLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """`AsyncLLM`, imported when it is wanted: asyncio would make the import of everything else longer."""
    if name != "AsyncLLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .async_engine import AsyncLLM

    return AsyncLLM
