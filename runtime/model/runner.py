"""What stands between engine and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.plan import BlockCopy

__all__ = ["Feeds", "KVGroup", "ModelRunner"]

#: The small inputs of a step by name of the model's interface (`custom_ops.manifest`): token ids, positions, lengths,
#: block tables, slot mappings and logits rows. Valid until the next step.
Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Cache to allocate for one cache group of the manifest, in its order."""

    num_blocks: int
    block_size: int


class ModelRunner(Protocol):
    """A converted model on some device. One thread calls it."""

    def allocate_kv(self, groups: Sequence[KVGroup]) -> None:
        """Allocates the caches of every layer; called once, before the first step. Their content may be anything."""

    def execute(self, feeds: Feeds) -> NDArray[np.float32]:
        """Runs one step and returns its logits `[R, vocab]`, valid until the next call. Raises StepError."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks in every layer of their group, one after the other."""

    def close(self) -> None:
        """Gives the caches back."""
