"""A roofline estimate for the kernel from the emulator's counters. It is a model, not a measurement.

Assumptions, all public figures or round numbers for one Atlas A2 (910B1) and none of them measured here: global memory
delivers 1.6 TB/s to all cores together; a vector core runs at 1.8 GHz and finishes one 256-byte vector step a cycle
plus a start-up of about 16 cycles an instruction; a copy costs the core that issues it nothing but bandwidth. The
estimate is the larger of the time that the moved bytes need and the time that the busiest vector core computes; it
leaves out scalar work, launch, synchronisation and everything that does not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .emulation import Counters

__all__ = ["ATLAS_A2", "Estimate", "Machine", "estimate"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Figures of the modelled device: bytes per second, Hz, cycles."""

    memory_bandwidth: float
    vector_clock: float
    instruction_start: float


ATLAS_A2: Final = Machine(memory_bandwidth=1.6e12, vector_clock=1.8e9, instruction_start=16.0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds that memory traffic and the busiest vector core need; the larger one bounds the kernel from below."""

    memory_seconds: float
    vector_seconds: float

    @property
    def seconds(self) -> float:
        """The modelled lower bound."""
        return max(self.memory_seconds, self.vector_seconds)

    @property
    def bound(self) -> str:
        """Which of the two it is: "memory" or "vector"."""
        return "memory" if self.memory_seconds >= self.vector_seconds else "vector"


def estimate(counters: Counters, machine: Machine = ATLAS_A2) -> Estimate:
    """The modelled time of a run that the emulator counted, on as many cores as it ran on."""
    moved = counters.gm_to_ub_bytes + counters.ub_to_gm_bytes
    starts = counters.vector_instructions / counters.cores * machine.instruction_start
    return Estimate(
        memory_seconds=moved / machine.memory_bandwidth,
        vector_seconds=(counters.busiest_core_repeats + starts) / machine.vector_clock,
    )
