"""Group masks: causal alignment, windows, sinks, softcap, ALiBi, bidirectional blocks, and their combinations."""

from __future__ import annotations

from typing import Any

from .case import Case, case

__all__ = ["cases"]

_SLOPES = (0.5, 0.25, 0.125, 0.0625)


def cases() -> list[Case]:
    """The cases of this group."""
    out = [
        case("masks/causal_chunk_on_past", new=(6,), past=(11,)),
        case("masks/causal_chunk_on_past_float16", new=(6,), past=(11,), compute="float16"),
        case("masks/bidirectional", attributes={"is_causal": 0}, new=(6, 1, 3), past=(11, 4, 0)),
        case("masks/bidirectional_bfloat16", attributes={"is_causal": 0}, compute="bfloat16"),
        case(
            "masks/bidirectional_window", attributes={"is_causal": 0, "local_window_size": 3}, new=(6, 4), past=(11, 0)
        ),
        case("masks/bidirectional_all_options", **_everything({"is_causal": 0, "local_window_size": 5})),
        case("masks/everything", **_everything({"local_window_size": 9})),
        case("masks/everything_float16", compute="float16", **_everything({"local_window_size": 9})),
    ]
    for window in (1, 2, 7, 8, 9, 16, 40):
        attributes: dict[str, Any] = {"local_window_size": window}
        out.append(case(f"masks/window_{window}", attributes=attributes, new=(1, 10, 5), past=(25, 0, 13)))
        out.append(
            case(
                f"masks/window_{window}_block_1", attributes=attributes, new=(1, 10, 5), past=(25, 0, 13), block_size=1
            )
        )
        out.append(
            case(f"masks/window_{window}_nan_left_of_it", attributes=attributes, new=(1, 3), past=(45, 21), dead="nan")
        )
    out += [
        case("masks/window_equals_context", attributes={"local_window_size": 17}, new=(1, 4), past=(16, 13)),
        case("masks/window_frees_leading_blocks", attributes={"local_window_size": 10}, new=(2, 1), past=(100, 64)),
        case("masks/window_long_prefill", attributes={"local_window_size": 33}, new=(150,), past=(70,), block_size=16),
        case("masks/window_float16", attributes={"local_window_size": 5}, new=(1, 10), past=(25, 3), compute="float16"),
    ]
    for name, attributes in (
        ("softcap_1", {"softcap": 1.0}),
        ("softcap_30", {"softcap": 30.0}),
        ("softcap_tiny", {"softcap": 0.05}),
    ):
        out += [case(f"masks/{name}_{t}", attributes=attributes, compute=t) for t in ("float32", "float16")]
    out += [
        case("masks/softcap_saturated", attributes={"softcap": 5.0}, gains=(60.0, 1.0, 1.0)),
        case("masks/softcap_before_scale_matters", attributes={"softcap": 2.0, "scale": 1.5}, gains=(1.0, 1.0, 1.0)),
    ]
    out += [case(f"masks/sink_{t}", sink=True, compute=t) for t in ("float32", "float16", "bfloat16")]
    out += [
        case("masks/sink_decode", sink=True, new=(1, 1), past=(40, 0)),
        case("masks/sink_not_scaled_nor_capped", sink=True, attributes={"scale": 0.05, "softcap": 0.3}),
        case("masks/sink_window_1", sink=True, attributes={"local_window_size": 1}),
        case("masks/sink_bidirectional", sink=True, attributes={"is_causal": 0}),
        case("masks/alibi", attributes={"alibi_slopes": _SLOPES}, new=(1, 6), past=(30, 9)),
        case(
            "masks/alibi_before_softcap", attributes={"alibi_slopes": _SLOPES, "softcap": 1.0}, new=(1, 6), past=(30, 9)
        ),
        case(
            "masks/alibi_window", attributes={"alibi_slopes": _SLOPES, "local_window_size": 7}, new=(1, 6), past=(30, 9)
        ),
        case("masks/alibi_bidirectional", attributes={"alibi_slopes": _SLOPES, "is_causal": 0}, new=(6,), past=(9,)),
        case("masks/alibi_float16", attributes={"alibi_slopes": _SLOPES}, compute="float16"),
        case("masks/alibi_negative_slope", attributes={"alibi_slopes": (-0.1, 0.0, 0.1, 1.0)}),
    ]
    return out


def _everything(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        "sink": True,
        "norm": True,
        "rotary_dim": 16,
        "new": (1, 7, 4),
        "past": (20, 0, 11),
        "attributes": {"softcap": 3.0, "scale": 0.3, "alibi_slopes": _SLOPES, **attributes},
    }
