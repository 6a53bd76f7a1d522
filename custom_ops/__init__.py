"""The PagedAttention op: contract, reference, CPU kernel, Ascend kernel and conformance suite."""

from .errors import ContractError, LibraryError, ManifestError, PagegraftError
from .library import library_path, register

__all__ = ["ContractError", "LibraryError", "ManifestError", "PagegraftError", "library_path", "register"]
