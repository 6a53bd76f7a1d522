"""Speed of the CPU op against this machine's limits and against other attentions of onnxruntime, in one run.

    python tests/performance/op_bench.py [--threads 2] [--rounds 9] [--only decode,long,...] [--json - | FILE]
    python tests/performance/op_bench.py --table     # the figures for a README, with what they were measured on

Every figure is a median over rounds in which all contenders take turns, so that a busy machine slows all of them alike;
compare within one run only. Bandwidth is measured by reading memory of the same kind as the caches, the arithmetic peak
by independent multiply-adds (machine.cc, compiled here with -march=native).

OpenVINO's paged attention takes part where openvino 2026.4 is installed (the `op-bench` extra has it); it is the one
other paged attention for CPU in a library. Its results are checked against ours before it is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from attention_models import Shape, paged, small_chain
from machine import Machine
from other_attentions import (
    attention_23,
    concat_attention,
    gathered_attention,
    group_query_attention,
    torch_sdpa,
)
from pagegraft.custom_ops import library_path

Run = Callable[[], None]
_SPINNING_SECONDS = 0.03
_WARMING_SECONDS = 0.03
_OPENVINO = "2026.4."
Figures = dict[str, float]


def medians(contenders: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Median seconds of each contender; all take turns in every round.

    The threads of an onnxruntime session go on spinning for a while after a run and would take the cores from whoever
    comes next: each turn waits for that to end, then runs unmeasured until its own threads and the processor are at
    speed again, as they are between the steps of a server.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            time.sleep(_SPINNING_SECONDS)
            warm = time.perf_counter() + _WARMING_SECONDS
            run()
            while time.perf_counter() < warm:
                run()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def openvino(shape: Shape, caches: Mapping[str, str], threads: int) -> dict[str, Run]:
    """OpenVINO's paged attention on caches of the types given by contender; none where its wheel is not installed."""
    if openvino_missing():
        return {}
    from openvino_attention import openvino_attention

    return {name: openvino_attention(shape, cache=cache, threads=threads) for name, cache in caches.items()}


def openvino_missing() -> str:
    """Why OpenVINO takes no part; empty if it does. Its op's inputs differ from release to release."""
    try:
        installed = version("openvino")
    except PackageNotFoundError:
        return "it is not installed"
    return "" if installed.startswith(_OPENVINO) else f"{installed} is installed instead of {_OPENVINO}"


def decode(machine: Machine, threads: int, rounds: int) -> Figures:
    """8 sequences of 4096 tokens, 32 query and 8 KV heads of 128: by cache type and block size, against the stream."""
    shape = Shape(sequences=8, past=4095, new=1, heads=32, kv_heads=8, head_size=128, block_size=16)
    types = ("float32", "float16", "bfloat16", "int8", "float8e4m3fn", "int4")
    contenders: dict[str, Run] = {t: paged(shape, cache=t, threads=threads, copies=shape.copies(t)) for t in types}
    contenders["float32_block128"] = paged(shape.with_block(128), cache="float32", threads=threads)
    stream = machine.reader(shape.kv_bytes("float32"), threads)
    theirs = openvino(shape, {f"openvino_{name}": name for name in ("float32", "float16", "int8")}, threads)
    t = medians({**contenders, **theirs, "stream": stream}, rounds)
    figures = {f"decode_{name}_tokens_per_s": shape.sequences / t[name] for name in contenders}
    figures |= {f"decode_{name}_gb_per_s": shape.kv_bytes(name) / t[name] / 1e9 for name in types}
    figures["stream_gb_per_s"] = shape.kv_bytes("float32") / t["stream"] / 1e9
    figures["decode_float32_of_stream"] = t["stream"] / t["float32"]
    figures |= {f"decode_{name}_speedup_over_float32": t["float32"] / t[name] for name in types[1:]}
    figures |= {f"decode_op_over_{name}": t[name] / t[name.removeprefix("openvino_")] for name in theirs}
    figures["decode_block16_over_block128"] = t["float32"] / t["float32_block128"]
    return figures


def long_context(machine: Machine, threads: int, rounds: int) -> Figures:
    """One sequence at 4K and 128K tokens: gain of threads against the stream's own, growth with the context."""
    shape = Shape(sequences=1, past=131071, new=1, heads=32, kv_heads=8, head_size=128, block_size=16)
    short = shape.with_past(4095)
    size = shape.kv_bytes("float32")
    t = medians(
        {
            "long_1": paged(shape, cache="float32", threads=1),
            "long_n": paged(shape, cache="float32", threads=threads),
            "short_n": paged(short, cache="float32", threads=threads, copies=shape.total // short.total),
            "stream_1": machine.reader(size, 1),
            "stream_n": machine.reader(size, threads),
        },
        rounds,
    )
    gain, stream_gain = t["long_1"] / t["long_n"], t["stream_1"] / t["stream_n"]
    return {
        "long_ms_per_token": t["long_n"] * 1e3,
        "long_thread_gain": gain,
        "stream_thread_gain": stream_gain,
        "long_thread_gain_of_stream_gain": gain / stream_gain,
        "long_growth_over_linear": t["long_n"] / t["short_n"] / 32,
    }


def prefill(machine: Machine, threads: int, rounds: int) -> Figures:
    """2048 new tokens, 32 heads of 128: part of the arithmetic peak over the unmasked operations."""
    figures: Figures = {}
    for kv_heads in (8, 32):
        shape = Shape(sequences=1, past=0, new=2048, heads=32, kv_heads=kv_heads, head_size=128, block_size=16)
        peak, flops = machine.multiplier(threads)
        t = medians({"op": paged(shape, cache="float32", threads=threads), "peak": peak}, rounds)
        rate, limit = shape.useful_flops() / t["op"], flops / t["peak"]
        figures[f"prefill_gflops_kv{kv_heads}"] = rate / 1e9
        figures[f"prefill_of_peak_kv{kv_heads}"] = rate / limit
        figures["peak_gflops"] = limit / 1e9
    return figures


def published(machine: Machine, threads: int, rounds: int) -> Figures:
    """Context 2048, 8 sequences, 32 heads of 128, 32 or 8 KV heads: against contiguous caches, and OpenVINO's paged."""
    figures: Figures = {}
    for kv_heads in (32, 8):
        shape = Shape(sequences=8, past=2047, new=1, heads=32, kv_heads=kv_heads, head_size=128, block_size=16)
        contenders = {
            "op": paged(shape, cache="float32", threads=threads),
            "concat": concat_attention(shape, threads=threads),
            "gqa": group_query_attention(shape, threads=threads),
            "gather": gathered_attention(shape, threads=threads),
            "attention_23": attention_23(shape, threads=threads),
            "stream": machine.reader(shape.kv_bytes("float32"), threads),
        }
        contenders |= openvino(shape, {"openvino": "float32"}, threads)
        sdpa = torch_sdpa(shape, threads=threads)
        if sdpa is not None:
            contenders["torch_sdpa"] = sdpa
        t = medians(contenders, rounds)
        for name in contenders:
            if name != "op":
                figures[f"kv{kv_heads}_op_over_{name}"] = t[name] / t["op"]
        figures[f"kv{kv_heads}_op_tokens_per_s"] = shape.sequences / t["op"]
    return figures


def small(machine: Machine, threads: int, rounds: int) -> Figures:
    """One token through 24 layers of a tiny model (4 query and 2 KV heads of 16), microseconds a layer."""
    layers = 24
    runs = {f"threads{n}": small_chain(layers, threads=n) for n in (1, threads)}
    t = medians(runs, rounds * 10)
    return {f"small_us_per_layer_{name}": seconds / layers * 1e6 for name, seconds in t.items()}


PARTS = {"decode": decode, "long": long_context, "prefill": prefill, "published": published, "small": small}


def machine_line(threads: int) -> str:
    """The processor, threads, instruction set and versions that the figures belong to."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    library = ctypes.CDLL(str(library_path()))
    library.pagegraft_isa.restype = ctypes.c_char_p
    isa = library.pagegraft_isa().decode()
    versions = (
        f"pagegraft {version('pagegraft')}, onnxruntime {version('onnxruntime')}, Python {platform.python_version()}"
    )
    return f"{model}, {threads} threads, {isa}; {versions}."


def main() -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma separated: " + ", ".join(PARTS))
    parser.add_argument("--json", help="write the figures as JSON to this file, - for standard output")
    parser.add_argument("--table", action="store_true", help="say above the table what it was measured on")
    options = parser.parse_args()
    if reason := openvino_missing():
        print(f"OpenVINO is left out: {reason}", file=sys.stderr)
    machine = Machine()
    figures: Figures = {}
    for name in options.only.split(","):
        print(f"measuring {name}", file=sys.stderr)
        figures |= PARTS[name](machine, options.threads, options.rounds)
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    if options.json == "-":
        print(json.dumps(rounded, indent=2))
    else:
        if options.json:
            Path(options.json).write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
        if options.table:
            print(machine_line(options.threads) + "\n")
        print("| figure | value |\n|---|---|")
        for name, value in rounded.items():
            print(f"| {name} | {value} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
