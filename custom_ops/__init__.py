"""The PagedAttention op: contract, reference, CPU kernel, Ascend kernel and conformance suite."""

from .errors import ContractError, LibraryError, ManifestError, PagegraftError

__all__ = [
    "ContractError",
    "LibraryError",
    "ManifestError",
    "PagegraftError",
    "__version__",
    "library_path",
    "register",
]

TYPE_CHECKING = False  # as type checkers know it; importing it from typing would take longer than all else here
if TYPE_CHECKING:
    from .library import library_path, register

    __version__: str
else:

    def __getattr__(name: str) -> object:
        """What takes time to import comes when it is wanted: the command passes here before it minds interrupts."""
        if name == "__version__":
            from importlib.metadata import version

            return version("pagegraft")
        if name in ("library_path", "register"):
            from . import library

            return getattr(library, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
