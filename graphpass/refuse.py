"""Refuses what no part of the pass can read, by the names of operators, before anything is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from pagegraft.custom_ops.spec import MICROSOFT_DOMAIN

from .errors import NotConvertible
from .normalise import onnxruntime_ops

__all__ = ["refuse_operators"]

_PLAIN = "export with MultiHeadAttention, GroupQueryAttention or plain operators"
_READ = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})


@dataclass(frozen=True)
class _Verdict:
    """Kind of refusal, what the operator does, and what helps."""

    kind: str
    why: str
    hint: str


_ONE_TOKEN = _Verdict("fused", "takes one token a step, and beams by way of an indirection", _PLAIN)
_BOTH_WAYS = _Verdict("mask", "has no past: tokens see their future", "export a causal decoder with past")
_PRODUCTS = _Verdict("fused", "multiplies 8-bit activations and weights itself", "quantise weights only (MatMulNBits)")
_RECURRENT = _Verdict("state", "keeps a recurrent state", "convolution and recurrent states cannot be paged")
_SPARSE = _Verdict(
    "mask",
    "sees blocks of the past that a table chooses",
    "only causal, windowed and ALiBi masks can be paged: export with dense attention",
)
_OTHER = _Verdict("fused", "is an attention whose rules are not known", _PLAIN)
_SEARCH = _Verdict(
    "search", "is a whole search around a decoder", "convert the decoder itself, as it was before the search"
)
_MICROSOFT_OPS: dict[str, _Verdict] = {
    "DecoderMaskedMultiHeadAttention": _ONE_TOKEN,
    "DecoderMaskedSelfAttention": _ONE_TOKEN,
    "DecoderAttention": _Verdict("encoder-decoder", "attends to an encoder's states", "export a decoder-only model"),
    "SparseAttention": _SPARSE,
    "DynamicSparseAttention": _SPARSE,
    "SparsePagedAttention": _SPARSE,
    "PackedAttention": _BOTH_WAYS,
    "PackedMultiHeadAttention": _BOTH_WAYS,
    "QAttention": _PRODUCTS,
    "QOrderedAttention": _PRODUCTS,
    "LinearAttention": _RECURRENT,
    "CausalConvWithState": _Verdict("state", "keeps the state of a convolution", _RECURRENT.hint),
    "GreedySearch": _SEARCH,
    "Sampling": _SEARCH,
}
_PLAIN_OPS: dict[str, _Verdict] = dict.fromkeys(("GRU", "LSTM", "RNN"), _RECURRENT)


def _verdict(domain: str, op_type: str) -> _Verdict | None:
    if not domain:
        return _PLAIN_OPS.get(op_type)
    if domain != MICROSOFT_DOMAIN or op_type in _READ:
        return None
    if op_type.endswith("BeamSearch"):
        return _SEARCH
    return _MICROSOFT_OPS.get(op_type) or (_OTHER if op_type.endswith("Attention") else None)


def refuse_operators(model: ir.Model) -> None:
    """Raises NotConvertible for the first node whose operator cannot be read, or is not known to onnxruntime: nothing
    about it can be evaluated."""
    known = onnxruntime_ops()
    for node in model.graph:
        domain = "" if node.domain == "ai.onnx" else node.domain
        verdict = _verdict(domain, node.op_type)
        if verdict is not None:
            raise NotConvertible(f"{node.op_type} {verdict.why}", node.name or "", verdict.hint, kind=verdict.kind)
        if (domain, node.op_type) not in known and node.op_identifier() not in model.functions:
            raise NotConvertible(
                f"onnxruntime has no op {domain or 'ai.onnx'}::{node.op_type}",
                node.name or "",
                "custom ops of other libraries are not supported: export with the operators of ai.onnx",
                kind="custom-op",
            )
