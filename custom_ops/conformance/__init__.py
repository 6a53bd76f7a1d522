"""The conformance suite of PagedAttention: cases, backends, tolerances, portable vectors.

On the command line `pagegraft conformance`; in another project's tests
`pytest --pyargs pagegraft.custom_ops.conformance --backend package.module:Class`.
"""

from .backends import FEATURES, Backend, Capabilities, load_backend
from .cases import GROUPS, Case, all_cases
from .run import Result, run_case, run_cases

__all__ = [
    "FEATURES",
    "GROUPS",
    "Backend",
    "Capabilities",
    "Case",
    "Result",
    "all_cases",
    "load_backend",
    "run_case",
    "run_cases",
]
