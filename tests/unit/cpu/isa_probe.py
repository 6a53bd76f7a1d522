"""Run as a program under one PAGEGRAFT_ISA: prints the instruction set in use and one line for each thing checked."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from op_calls import Feeds, copied, make_feeds, make_session, run_bound
from pagegraft.custom_ops import library_path
from pagegraft.custom_ops.conformance.call import Call, Setup, build
from pagegraft.custom_ops.conformance.check import MismatchError, check_outputs
from pagegraft.custom_ops.conformance.cpu_backend import CpuBackend
from pagegraft.custom_ops.doctor import chosen_isa
from pagegraft.custom_ops.reference import paged_attention
from pagegraft.custom_ops.spec import AttentionAttributes

# Decoding, a short and a long prefill chunk, several ranges of positions, an empty sequence.
LENGTHS = [(700, 1), (3, 40), (0, 0), (1300, 2), (0, 90)]
# Head size and attributes; 128 makes four tokens' rows fill 4,096 bytes.
VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (24, {}),
    (24, {"local_window_size": 50, "softcap": 5.0}),
    (24, {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "is_causal": 0}),
    (128, {"local_window_size": 600}),
]
# Caches of which two or four tokens' rows fill 4,096 bytes.
FILLED_PAGES = [
    ("float32", "NONE", 2, 128),
    ("float32", "NONE", 4, 128),
    ("float16", "NONE", 4, 128),
    ("int8", "PER_TOKEN", 8, 128),
    ("int8", "PER_TOKEN", 8, 256),
    ("int4", "PER_CHANNEL", 8, 256),
    ("float8e4m3fn", "PER_TENSOR", 8, 128),
]


def solo(feeds: Feeds, sequence: int) -> Feeds:
    """The call that holds only one of the sequences."""
    first, last = feeds["cumulative_sequence_length"][sequence : sequence + 2]
    rows = {name: feeds[name][first:last].copy() for name in ("query", "key", "value")}
    return {
        **copied(feeds),
        **rows,
        "cumulative_sequence_length": np.array([0, last - first], np.int32),
        "past_seqlens": feeds["past_seqlens"][sequence : sequence + 1].copy(),
        "block_table": feeds["block_table"][sequence : sequence + 1].copy(),
    }


def poison(feeds: Feeds) -> None:
    """NaN into every slot that holds no token of a sequence."""
    block_size = feeds["key_cache"].shape[1]
    live = np.zeros(feeds["key_cache"].shape[:2], bool)
    for row, past in zip(feeds["block_table"], feeds["past_seqlens"], strict=True):
        for position in range(past):
            live[row[position // block_size], position % block_size] = True
    for name in ("key_cache", "value_cache"):
        feeds[name][~live] = np.nan


def coded(cache: str, head_size: int) -> Call:
    """A decoding step on codes, three query heads to a KV head."""
    setup = Setup(
        new=(1,),
        past=(37,),
        query_heads=6,
        head_size=head_size,
        block_size=16,
        cache=cache,
        k_quant="PER_TENSOR",
        v_quant="PER_TOKEN" if cache == "int8" else "",
        attributes={"scale": 1 / (head_size * 127)},
    )
    return build(setup, head_size)


def largest_sums(cache: str, head_size: int) -> Call:
    """Every element of query and key as large as it can be, the keys' signs in turn."""
    call = coded(cache, head_size)
    call.feeds["query"][:] = 1.0
    call.feeds["k_scale"][:] = 1.0 if cache == "int8" else 16.0
    call.feeds["key_cache"][:] = 127 if cache == "int8" else 0xFF
    call.feeds["key_cache"][:, ::2] = -128 if cache == "int8" else 0
    return call


def not_finite(cache: str, what: str) -> Call:
    """NaN or infinity in one head of the query, or as the scale of a token's value."""
    call = coded(cache, 48)
    if what == "scale":
        call.feeds["v_scale"][call.feeds["block_table"][0, 1], 0, 3] = np.nan
    else:
        call.feeds["query"][0, 50] = np.nan if what == "nan" else np.inf
    return call


def infinite_value(cache: str) -> Call:
    """A decoding step whose new value is infinite in one channel; 39 tokens fill no step of several."""
    call = build(Setup(new=(1,), past=(38,), query_heads=4, block_size=16, cache=cache), 38)
    call.feeds["value"][0, 3] = np.inf
    return call


def filled_pages(
    cache: str, quant: str, kv_heads: int, head_size: int, attributes: dict[str, Any], *, value_size: int | None = None
) -> Call:
    """Decoding and a few rows where the rows of two or four tokens fill a page; one block is not mapped."""
    setup = Setup(
        new=(1, 3, 1, 1, 3),
        # Windows of 71 begin with a group of 16 tokens or within one; the last sequence's rows end within and with one.
        past=(150, 310, 239, 9, 317),
        query_heads=kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_head_size=value_size,
        block_size=32,
        cache=cache,
        k_quant=quant,
        v_quant=quant,
        dead="nan",
        unmapped=((0, 2),),
        attributes=attributes,
    )
    return build(setup, kv_heads)


def agrees(call: Call) -> bool:
    """Whether the op's results are those of the reference."""
    private = call.copy()
    try:
        with np.errstate(invalid="ignore"):
            check_outputs(call, CpuBackend(threads=1).run(private.feeds, private.attributes), paged_attention)
    except MismatchError:
        return False
    return True


def main() -> None:
    """Prints `isa NAME`, then `ok` or `wrong` with the check's name."""
    print("isa", chosen_isa(library_path()))

    def report(name: str, good: object) -> None:
        print("ok" if good else "wrong", name)

    for i, (head_size, variant) in enumerate(VARIANTS):
        attributes = {"num_heads": 4, "kv_num_heads": 2, **variant}
        feeds = make_feeds(LENGTHS, head_size=head_size, block_size=16)
        poison(feeds)
        outputs = [run_bound(make_session(feeds, attributes, threads=n), copied(feeds)) for n in (1, 2, 4)]
        expected = paged_attention(copied(feeds), AttentionAttributes.from_dict(attributes))["output"]
        report(f"{i} right", np.abs(outputs[0] - expected).max() < 1e-5)
        report(f"{i} threads", len({hashlib.sha256(o.tobytes()).hexdigest() for o in outputs}) == 1)
        session = make_session(feeds, attributes, threads=2)
        for s in range(len(LENGTHS)):
            first, last = feeds["cumulative_sequence_length"][s : s + 2]
            alone = run_bound(session, solo(feeds, s))
            report(f"{i} sequence {s} alone", alone.tobytes() == outputs[0][first:last].tobytes())
    for cache in ("int8", "int4"):
        for head_size in (128, 512, 1024):
            report(f"largest sums of {cache}, {head_size}", agrees(largest_sums(cache, head_size)))
        for what in ("nan", "inf", *(["scale"] if cache == "int8" else [])):
            report(f"{what} beside {cache}", agrees(not_finite(cache, what)))
    for cache in ("float32", "float16", "bfloat16"):
        report(f"infinite value in {cache}", agrees(infinite_value(cache)))
    for cache, quant, kv_heads, head_size in FILLED_PAGES:
        slopes = [2.0**-h for h in range(kv_heads)]
        for attributes in ({}, {"local_window_size": 71}, {"alibi_slopes": slopes}):
            good = agrees(filled_pages(cache, quant, kv_heads, head_size, attributes))
            report(f"pages of {cache}, {kv_heads} heads of {head_size}, {list(attributes)}", good)
    report("pages of keys alone", agrees(filled_pages("float32", "NONE", 2, 128, {}, value_size=64)))


if __name__ == "__main__":
    main()
