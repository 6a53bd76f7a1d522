"""Sampling: what callers may ask (`SamplingParams`), what a sequence remembers, and the choice of tokens.

Arrays are named by shape: `R` rows of a step, `V` vocabulary, `K` likeliest tokens reported, `n` candidates of a row.
"""

from pagegraft.runtime.sampling.errors import SamplingError, SamplingParamsError
from pagegraft.runtime.sampling.logprobs import TokenLogprobs, prompt_logprobs
from pagegraft.runtime.sampling.params import BeamSearchParams, SamplingParams
from pagegraft.runtime.sampling.rng import fresh_seed
from pagegraft.runtime.sampling.sampler import SampledTokens, Sampler
from pagegraft.runtime.sampling.state import SamplingState

__all__ = [
    "BeamSearchParams",
    "SampledTokens",
    "Sampler",
    "SamplingError",
    "SamplingParams",
    "SamplingParamsError",
    "SamplingState",
    "TokenLogprobs",
    "fresh_seed",
    "prompt_logprobs",
]
