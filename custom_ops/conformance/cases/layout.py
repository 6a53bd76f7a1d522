"""Group layout: block tables, slots, dead memory, ragged batches, sequences without tokens."""

from __future__ import annotations

from .case import Case, case

__all__ = ["cases"]


def cases() -> list[Case]:
    """The cases of this group."""
    out = [
        case(f"layout/table_{t}", table=t, new=(1, 5, 2), past=(30, 17, 26))
        for t in ("contiguous", "shared", "repeated")
    ]
    out += [
        case(f"layout/table_{t}_float16", table=t, compute="float16", new=(1, 5), past=(30, 17))
        for t in ("shared", "repeated")
    ]
    for dead in ("nan", "inf"):
        for t in ("float32", "float16", "bfloat16"):
            out.append(case(f"layout/dead_{dead}_{t}", dead=dead, compute=t, new=(1, 9, 3), past=(13, 0, 6)))
        out.append(case(f"layout/dead_{dead}_block_64", dead=dead, block_size=64, new=(1, 9), past=(70, 3)))
        out.append(case(f"layout/dead_{dead}_odd_head", dead=dead, head_size=3, new=(1, 9), past=(70, 3)))
        out.append(
            case(f"layout/dead_{dead}_unmapped", dead=dead, unmapped=((0, 1), (1, 0)), new=(1, 3), past=(30, 17))
        )
    out += [
        case("layout/empty_sequences", new=(0, 3, 0, 1, 0), past=(7, 2, 0, 9, 500)),
        case("layout/only_empty_sequences", new=(0, 0), past=(7, 0)),
        case("layout/empty_sequences_between_decodes", new=(1, 0, 1), past=(7, 3, 9), compute="float16"),
        case("layout/no_sequences", new=(), past=()),
        case("layout/slots_explicit", slots="explicit"),
        case("layout/slots_explicit_float16", slots="explicit", compute="float16"),
        case("layout/slots_none", slots="none", new=(1, 4), past=(9, 12)),
        case("layout/slots_elsewhere", slots="elsewhere", new=(1, 4), past=(9, 12)),
        case("layout/slots_speculative_tail", slots="explicit", skipped=(2, 3, 7), new=(4, 4), past=(9, 12)),
        case("layout/slots_speculative_decode", slots="explicit", skipped=(1,), new=(1, 1, 1), past=(9, 12, 3)),
        case("layout/slots_prefix_hit", slots="explicit", skipped=tuple(range(8)), new=(12,), past=(0,)),
        case("layout/slots_none_nan_elsewhere", slots="none", dead="nan", new=(1, 4), past=(9, 12)),
        case("layout/slots_none_packed", slots="none", packed=True, new=(2, 4), past=(9, 12)),
        case("layout/slots_none_rotary_norm", slots="none", norm=True, rotary_dim=16, new=(2, 4), past=(9, 12)),
        case("layout/unmapped_first", unmapped=((0, 0),), new=(1, 3), past=(30, 17)),
        case("layout/unmapped_middle", unmapped=((0, 1), (1, 1)), new=(1, 3), past=(30, 17)),
        case("layout/unmapped_written_block", unmapped=((0, 3),), new=(1, 3), past=(30, 17)),
        case("layout/unmapped_all", unmapped=((0, 0), (0, 1)), new=(3, 2), past=(10, 4)),
        case("layout/unmapped_all_sink", unmapped=((0, 0), (0, 1)), new=(3, 2), past=(10, 4), sink=True),
        case("layout/unmapped_window", unmapped=((0, 3),), new=(2,), past=(30,), attributes={"local_window_size": 4}),
        case("layout/unmapped_float16", unmapped=((0, 1), (1, 1)), new=(1, 3), past=(30, 17), compute="float16"),
        case("layout/unmapped_bidirectional", unmapped=((0, 1),), new=(5,), past=(14,), attributes={"is_causal": 0}),
        case("layout/unmapped_block_1", unmapped=((0, 2), (0, 5), (1, 0)), new=(2, 1), past=(6, 3), block_size=1),
        case("layout/ids_around_65536", id_offset=65530, head_size=4, block_size=2, kv_heads=1, past=(25, 8, 3)),
        case("layout/ids_around_32768", id_offset=32760, head_size=4, block_size=2, kv_heads=1, past=(25, 8, 3)),
        case("layout/tokens_past_block_boundary", block_size=4, new=(9, 4, 1), past=(3, 4, 7)),
        case("layout/many_blocks_shuffled", block_size=2, new=(1, 40), past=(90, 0)),
    ]
    return out
