"""Sampling: what callers may ask (`SamplingParams`), what a sequence remembers, and the choice of tokens.

Arrays are named by shape: `R` rows of a step, `V` vocabulary, `K` likeliest tokens reported, `n` candidates of a row.
"""

from .beam import BeamHypothesis, BeamSearch, BeamStep, beam_candidates
from .errors import SamplingError, SamplingParamsError
from .grammar import Grammar, GrammarCompiler
from .logprobs import TokenLogprobs, prompt_logprobs
from .params import BeamSearchParams, SamplingParams
from .rng import fresh_seed
from .sampler import SampledTokens, Sampler
from .state import SamplingState
from .structured import StructuredOutputsParams

__all__ = [
    "BeamHypothesis",
    "BeamSearch",
    "BeamSearchParams",
    "BeamStep",
    "Grammar",
    "GrammarCompiler",
    "SampledTokens",
    "Sampler",
    "SamplingError",
    "SamplingParams",
    "SamplingParamsError",
    "SamplingState",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "beam_candidates",
    "fresh_seed",
    "prompt_logprobs",
]
