"""The PagedAttention op: contract, reference, CPU kernel, Ascend kernel and conformance suite."""

from typing import TYPE_CHECKING

from .errors import ContractError, LibraryError, ManifestError, PagegraftError
from .library import library_path, register

__all__ = [
    "ContractError",
    "LibraryError",
    "ManifestError",
    "PagegraftError",
    "__version__",
    "library_path",
    "register",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """`__version__`, looked up when it is wanted: that takes longer than all other imports here."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version("pagegraft")
