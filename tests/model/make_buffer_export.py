"""Makes tests/data/exports/buffer__mob: a decoder whose caches are buffers of fixed length that new rows are written
into, as the released mobius exporter makes it with a static cache.

    pip install torch==2.13.0 transformers==5.24.0 mobius-onnx==0.1.0
    python tests/model/make_buffer_export.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
from mobius._builder import build_from_module
from mobius._configs import ArchitectureConfig
from mobius.models import CausalLMModel
from mobius.tasks import CausalLMTask

LENGTH = 128


def main() -> None:
    """Writes the model with random weights."""
    config = ArchitectureConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        pad_token_id=0,
        rope_type="default",
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    )
    package = build_from_module(CausalLMModel(config), config, task=CausalLMTask(static_cache=True, max_seq_len=LENGTH))
    model = package["model"]
    rng = np.random.default_rng(0)
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            weights = rng.standard_normal([int(d) for d in value.shape])
            weights = weights * weights.shape[-1] ** -0.5 if weights.ndim > 1 else 1 + 0.1 * weights
            value.const_value = ir.tensor(weights.astype(np.float32), name=name)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    ir.save(model, out / "model.onnx")
    (out / "config.json").write_text(json.dumps({"max_position_embeddings": LENGTH}) + "\n")


if __name__ == "__main__":
    main()
