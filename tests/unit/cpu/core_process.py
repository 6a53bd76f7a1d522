"""The kernel core as a conformance backend without onnxruntime: a replay program on the other end of two pipes.

The environment variable PAGEGRAFT_CORE_REPLAY holds its command, for example the program of a sanitizer build, or
`qemu-aarch64 -L /usr/aarch64-linux-gnu PROGRAM` for one that was compiled for another processor.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
from pagegraft.custom_ops.conformance.backends import Capabilities
from pagegraft.custom_ops.errors import ContractError
from pagegraft.custom_ops.spec import CACHE_DTYPES, INPUTS, QUANT_TYPES, AttentionAttributes
from pagegraft.custom_ops.validation import element_type, geometry_of

__all__ = ["CoreProcess"]

Array = np.ndarray[Any, Any]

_COMPUTE = ("float32", "float16", "bfloat16")
_CACHES = tuple(CACHE_DTYPES)


class CoreProcess:
    """Runs calls in the replay program. Feeds are checked by the core; attributes by `AttentionAttributes` first."""

    name = "core"

    def __init__(self) -> None:
        command = os.environ.get("PAGEGRAFT_CORE_REPLAY")
        if not command:
            raise ContractError("PAGEGRAFT_CORE_REPLAY is not set: it holds the command of the replay program")
        self._process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.isa = self._stdout.readline().decode().strip()

    def capabilities(self) -> Capabilities:
        """The whole contract, up to what is worth sending through a pipe."""
        return Capabilities(bitwise=True, max_cache_bytes=1 << 26)

    def close(self) -> int:
        """Ends the program; returns its exit code, which is not 0 when a sanitizer found something."""
        self._stdin.close()
        return self._process.wait(timeout=60)

    def run(self, feeds: dict[str, Array], attributes: dict[str, Any]) -> Mapping[str, Array]:
        """One call, as `Backend.run`."""
        parsed = AttentionAttributes.from_dict(attributes)
        g = geometry_of(feeds, parsed)
        self._send(feeds, parsed, g.compute_dtype, g.cache_dtype)
        reply = self._stdout.readline().decode()
        if reply.startswith("error "):
            raise ContractError(reply.removeprefix("error ").strip())
        if not reply.startswith("ok "):
            raise RuntimeError(f"the replay program ended (exit code {self._process.wait(timeout=60)})")
        parts = [self._stdout.read(int(size)) for size in reply.split()[1:]]
        out: dict[str, Array] = {}
        shape = (g.tokens, g.query_heads * g.value_head_size)
        out["output"] = np.frombuffer(parts[0], feeds["query"].dtype).reshape(shape)
        for name, part in zip(("key_cache", "value_cache"), parts[1:3], strict=True):
            if name in feeds:
                out[f"{name}_out"] = np.frombuffer(part, feeds[name].dtype).reshape(feeds[name].shape)
        for letter, part in zip("kv", parts[3:], strict=True):
            if getattr(parsed, f"{letter}_quant_type") == "PER_TOKEN":
                name = f"{letter}_scale"
                out[f"{name}_out"] = np.frombuffer(part, np.float32).reshape(feeds[name].shape)
        return out

    def _send(self, feeds: Mapping[str, Array], a: AttentionAttributes, compute: str, cache: str) -> None:
        numbers: list[object] = [0, _COMPUTE.index(compute), _CACHES.index(cache), a.num_heads, a.kv_num_heads]
        numbers += [int(a.scale is not None), a.scale or 0.0, a.softcap, a.local_window_size, a.is_causal, a.do_rotary]
        numbers += [a.rotary_interleaved, a.rotary_offset, a.qk_norm_epsilon]
        numbers += [QUANT_TYPES.index(a.k_quant_type), QUANT_TYPES.index(a.v_quant_type), int(a.latent), a.v_head_size]
        numbers += [len(a.alibi_slopes), *a.alibi_slopes]
        data = []
        for p in INPUTS:
            if p.name not in feeds:
                numbers.append(-1)
                continue
            array = np.ascontiguousarray(feeds[p.name])
            numbers += [array.ndim, *array.shape, array.nbytes]
            data.append(array.tobytes())
            assert element_type(array) in p.pagegraft_types
        try:
            self._stdin.write((" ".join(map(str, numbers)) + "\n").encode() + b"".join(data))
            self._stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the replay program ended (exit code {self._process.wait(timeout=60)})") from None
