"""Runs converted models: block pool, block tables, continuous batching, sampling, streaming, server."""

from ..custom_ops import __version__
from .config import EngineConfig
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]
