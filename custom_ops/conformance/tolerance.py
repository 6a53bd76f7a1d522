"""How far a correct backend may be from the float64 reference, with the derivation.

Notation: u is the unit roundoff of a type (2^-24 float32, 2^-11 float16, 2^-8 bfloat16), uT that of the compute type,
u32 that of the accumulators, which the contract wants in float32 or better. V is the largest |value| that the call can
read and v its root mean square; S = |scale| * max ||q|| * max ||k|| bounds every sum of |q_i k_i| (Cauchy-Schwarz).

output
    An output is sum_j w_j v_j with softmax weights w. Three kinds of error add up.
    * Rounding in the compute type: the output is rounded once (uT * V), and kernels on matrix units round the weights
      to the compute type before the second product (uT * V): `2 * uT * V`.
    * Score errors. A score that is off by d changes its weight by the factor e^d, and the output by at most 2 d V.
      Accumulating D products in float32 gives d <= S * u32 * sqrt(D) for rounding errors of random sign; the scaling,
      the softcap and the exponential add a few roundings of a score: d = S * u32 * (sqrt(D) + 8). ALiBi adds at most
      A = max |slope| * P to a score, with a few roundings of the sum: 4 * A * u32.
    * Summation over P keys in float32: V * u32 * (sqrt(P) + 8) for numerator and denominator each.
    Query heads that went through norm or rotary may be rounded to the compute type in between. Each channel then has an
    independent relative error below uT, and the score an error of about uT * S / sqrt(D); weighted by softmax it moves
    the output by that times v; four times that is far beyond what rounding of random sign reaches.
    Where the cache holds int8 or int4 codes, query heads and weights may be rounded to 16-bit integers, in units of
    2^-15 of the largest of a head or of 16 weights: an error up to u16 = 2^-16 of the largest, 256 times below that of
    the codes themselves. A head's largest element is hardly more than four times its root mean square, so a score is
    off by about S * u16 * min(1, 4 / sqrt(D)), and a sum over 16 weights by 4 * u16 of their largest; softmax and the
    random signs of values weigh both with v. Twice that is allowed.
stored values
    What is copied without a change of type is bit-identical. What is converted may differ by one step of the cache
    type: neighbouring codes for int8, int4, fp8 and 16-bit floats. Only values beside a tie do differ, so at most one
    code in a hundred (and two more) may, unless norm or rotary moved the value before. Norm and rotary are
    sums that can cancel, so their results are off by up to 4 uT times the largest channel of the head, in the cache's
    units. The norm's mean of D squares, summed in float32, adds half of its u32 * sqrt(D) (the root halves it).
    Per-token scales may be off by 4 roundings of float32, or by as much as a channel after norm or rotary.

When stored values differ from the reference's within these bounds, the output is compared with what the reference
computes from the values as stored: a code that fell on the other side of a tie is not charged twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Final

__all__ = [
    "MOST_DIFFERING_CODES",
    "UNIT_ROUNDOFF",
    "OutputScale",
    "output_tolerance",
    "stored_steps",
    "transformed_error",
]

UNIT_ROUNDOFF: Final[Mapping[str, float]] = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
#: Part of the quantised codes that may be one step off when the value itself is exact.
MOST_DIFFERING_CODES: Final = 0.01
_WORD_ROUNDOFF: Final = 2.0**-16
_LARGEST_CODE: Final[Mapping[str, int]] = {"int8": 127, "int4": 7}


@dataclass(frozen=True, kw_only=True)
class OutputScale:
    """The magnitudes that bound rounding errors of one call: V, v, S, A, D and P of the module's docstring."""

    value_max: float
    value_rms: float
    score_bound: float
    bias_bound: float
    head_size: int
    keys: int


def output_tolerance(compute_dtype: str, cache_dtype: str, scale: OutputScale, *, transformed: bool) -> float:
    """Largest absolute error of an output element. `transformed`: the query went through norm or rotary."""
    uT, u32 = UNIT_ROUNDOFF[compute_dtype], UNIT_ROUNDOFF["float32"]
    rounding = 2 * uT * scale.value_max
    score_error = scale.score_bound * u32 * (sqrt(scale.head_size) + 8) + 4 * scale.bias_bound * u32
    sums = 2 * scale.value_max * u32 * (sqrt(scale.keys) + 8)
    query = 4 * uT * scale.score_bound / sqrt(scale.head_size) * scale.value_rms if transformed else 0.0
    words = 0.0
    if cache_dtype in _LARGEST_CODE:
        score = scale.score_bound * min(1.0, 4 / sqrt(scale.head_size))
        words = 2 * _WORD_ROUNDOFF * (score + 4) * scale.value_rms
    return rounding + 2 * score_error * scale.value_max + sums + query + words


def transformed_error(compute_dtype: str, head_size: int) -> float:
    """Error of a normed or rotated channel, relative to the largest channel of its head."""
    return 4 * UNIT_ROUNDOFF[compute_dtype] + UNIT_ROUNDOFF["float32"] * sqrt(head_size) / 2


def stored_steps(compute_dtype: str, cache_dtype: str, *, transformed: bool) -> int:
    """Steps of the cache type by which a converted value may differ."""
    if not transformed:
        return 1
    return 1 + int(4 * UNIT_ROUNDOFF[compute_dtype] * _LARGEST_CODE.get(cache_dtype, 0))
