"""PagedAttention by torch_npu's own paged operators, for when the operator package is not installed.

`_npu_reshape_and_cache` writes, `npu_fused_infer_attention_score` attends. They do less than the contract: plain causal
attention with float16 or bfloat16 caches. Everything else is refused by name. Not run on a device by us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ...errors import ContractError
from ...spec import INPUTS, AttentionAttributes

__all__ = ["torch_npu_attention"]

_LARGEST_ROW: Final = 65535  # kv heads * head size, a 16-bit stride of the copy engine
_MASK_SIZE: Final = 2048  # of the compressed causal mask (sparse mode 3)


def torch_npu_attention(torch: Any, torch_npu: Any) -> Callable[..., Any]:
    """The op's implementation on the two operators. It raises ContractError for a call that they cannot do."""
    mask = torch.triu(torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.int8), diagonal=1)

    def run(*inputs: Any, **given: Any) -> Any:
        tensors = {spec.name: t for spec, t in zip(INPUTS, inputs, strict=False) if t is not None}
        attributes = AttentionAttributes.from_dict({k: v for k, v in given.items() if v is not None and v != []})
        lengths = tensors["past_seqlens"].tolist()
        ends = tensors["cumulative_sequence_length"].tolist()[1:]
        new = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        _refuse(tensors, attributes, max(new, default=0))
        _write(torch_npu, tensors, attributes)
        keys, values = tensors["key_cache"], tensors["value_cache"]
        blocks, size, heads, width = keys.shape
        output, _ = torch_npu.npu_fused_infer_attention_score(
            tensors["query"].view(-1, attributes.num_heads, width),
            keys.view(blocks, size, heads * width),
            values.view(blocks, size, heads * width),
            atten_mask=mask.to(keys.device),
            block_table=tensors["block_table"],
            input_layout="TND",
            block_size=size,
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=[past + n for past, n in zip(lengths, new, strict=True)],
            num_heads=attributes.num_heads,
            num_key_value_heads=heads,
            scale=width**-0.5 if attributes.scale is None else attributes.scale,
            sparse_mode=3,
        )
        return output.reshape(len(tensors["query"]), -1)

    return run


def _write(torch_npu: Any, tensors: Mapping[str, Any], attributes: AttentionAttributes) -> None:
    """New keys and values to their slots; tokens with slot -1 are left out."""
    slots = tensors["slot_mapping"]
    kept = slots >= 0
    shape = (-1, attributes.kv_num_heads, tensors["key_cache"].shape[-1])
    torch_npu._npu_reshape_and_cache(
        key=tensors["key"].view(shape)[kept].contiguous(),
        value=tensors["value"].view(shape)[kept].contiguous(),
        key_cache=tensors["key_cache"],
        value_cache=tensors["value_cache"],
        slot_indices=slots[kept].contiguous(),
    )


def _refuse(tensors: Mapping[str, Any], a: AttentionAttributes, longest: int) -> None:
    cache, size = tensors["key_cache"], tensors["key_cache"].shape[1]
    rules = {
        "packed QKV": "key" not in tensors,
        "a missing slot_mapping": "slot_mapping" not in tensors,
        "rotary embedding in the op": bool(a.do_rotary),
        "q/k norms in the op": "q_norm_weight" in tensors,
        "head_sink": "head_sink" in tensors,
        "softcap": a.softcap > 0,
        "local_window_size": a.local_window_size > 0,
        "alibi_slopes": bool(a.alibi_slopes),
        "is_causal=0": not a.is_causal,
        "the LATENT layout": a.latent,
        "quantised caches": cache.dtype != tensors["query"].dtype,
        "float32": tensors["query"].element_size() != 2,
        "key and value heads of different size": tensors.get("value_cache", cache).shape != cache.shape,
        f"heads of more than {_LARGEST_ROW} elements": cache.shape[2] * cache.shape[3] > _LARGEST_ROW,
        f"block size {size} for prompts (128, 256, 384 or 512 needed)": longest > 1 and (size % 128 != 0 or size > 512),
        f"block size {size} (up to 512)": size > 512,
    }
    for name, broken in rules.items():
        if broken:
            raise ContractError(
                f"torch_npu's own operators cannot do PagedAttention with {name}: build pagegraft's operator package "
                "and set PAGEGRAFT_TORCH_OPS (custom_ops/ascend/README.md)"
            )
