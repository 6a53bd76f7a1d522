"""The Ascend kernel under the emulator as a conformance backend (`ascend-emulator`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..conformance.backends import Capabilities
from ..spec import AttentionAttributes
from ..validation import Array
from .emulation import Device, paged_attention

__all__ = ["MAX_ALIBI_HEADS", "AscendEmulatorBackend"]

#: Heads that the tiling has room for slopes for (`kMaxAlibiHeads`).
MAX_ALIBI_HEADS: Final = 128

_CLAIMED: Final = frozenset(
    {
        "packed_qkv",
        "slot_mapping",
        "unmapped_blocks",
        "noncausal",
        "window",
        "softcap",
        "sink",
        "metadata",
        "split_head_sizes",
        "alibi",
    }
)


class AscendEmulatorBackend:
    """Runs each call on four emulated vector cores, contexts cut from 64 positions on.

    Malformed lengths cannot be refused on the device: the kernel treats such a sequence as one without visible
    positions, and impossible block ids and slots as -1.
    """

    name = "ascend-emulator"

    def capabilities(self) -> Capabilities:
        """What the tiling accepts (`op_host/paged_attention_tiling_math.h`)."""
        return Capabilities(
            cache_dtypes=frozenset({"float32", "float16", "bfloat16", "int8"}),
            features=_CLAIMED,
            head_size_multiple=16,
            max_head_size=256,
            bad_ids="masked",
            validates=False,
            max_cache_bytes=1 << 40,
        )

    def run(self, feeds: dict[str, Array], attributes: dict[str, Any]) -> Mapping[str, Array]:
        """Runs `emulation.paged_attention`."""
        device = Device(vector_cores=4, min_split_tokens=64)
        return paged_attention(feeds, AttentionAttributes.from_dict(attributes), device, in_place=True)[0]
