"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from ..custom_ops.manifest import is_block_size
from ..custom_ops.spec import MAX_BLOCK_SIZE
from .engine.errors import ConfigurationError

__all__ = ["Device", "EngineConfig", "Settings"]

Device = Literal["cpu", "npu", "torch"]

_SEQUENCES = 128


class Settings(TypedDict, total=False):
    """The fields of EngineConfig as keyword arguments of LLM and AsyncLLM."""

    kv_memory: int | str | None
    num_blocks: int | None
    block_size: int | None
    max_num_batched_tokens: int
    max_num_seqs: int | None
    enable_prefix_caching: bool
    num_speculative_tokens: int
    num_threads: int | None
    device: str
    debug: bool
    shared_memory: str | None
    chat_template: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine is set up. Raises ConfigurationError for values that cannot work.

    kv_memory: bytes for the caches, as a number or like "2GiB"; None takes a share of the free memory
        (`model.memory.DEFAULT_FRACTION`), at most what all sequences together can use.
    num_blocks: blocks in each cache group, instead of kv_memory.
    block_size: tokens a block, a power of two; None is the model's own choice.
    max_num_batched_tokens: tokens a step computes at most: larger is faster, smaller delays running outputs less.
    max_num_seqs: sequences that run at once at most; None is 128, or max_num_batched_tokens when that is less.
    enable_prefix_caching: share blocks of equal prefixes, and keep them after their request.
    num_speculative_tokens: tokens guessed from the context and verified in a step (prompt lookup); 0 guesses none. The
        output is the same. It pays for few sequences whose output repeats their prompt.
    num_threads: threads of the model; None is one a core.
    device: "cpu" (onnxruntime), "npu" (Ascend, through torch_npu), or "torch" (the runner of "npu" on torch's CPU).
    debug: check all accounting after each step.
    shared_memory: name of a POSIX shared memory region that holds the caches, where other processes can read them
        (`model.shared_memory.attach`); it is freed even after `kill -9`, by the next engine that uses any.
    chat_template: jinja2 text to use instead of the model's own templates.
    """

    kv_memory: int | str | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int | None = None
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    num_threads: int | None = None
    device: str = "cpu"  # one of Device
    debug: bool = False
    shared_memory: str | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "num_threads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name}={value!r}: must be a whole number of at least 1")
        if not isinstance(self.num_speculative_tokens, int) or self.num_speculative_tokens < 0:
            raise ConfigurationError(
                f"num_speculative_tokens={self.num_speculative_tokens!r}: must be a whole number of at least 0"
            )
        if self.block_size is not None and not is_block_size(self.block_size):
            raise ConfigurationError(f"block_size={self.block_size}: must be a power of two up to {MAX_BLOCK_SIZE}")
        if self.device not in get_args(Device):
            raise ConfigurationError(f"device '{self.device}' is unknown; there are: {', '.join(get_args(Device))}")
        if self.device != "cpu" and self.shared_memory is not None:
            raise ConfigurationError(
                f"shared memory is memory of the host and the caches of device '{self.device}' are not in it: leave "
                "shared_memory out"
            )
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ConfigurationError("num_blocks and kv_memory both size the cache: give one of them")

    @property
    def sequences(self) -> int:
        """Sequences that run at once at most."""
        return min(_SEQUENCES, self.max_num_batched_tokens) if self.max_num_seqs is None else self.max_num_seqs
