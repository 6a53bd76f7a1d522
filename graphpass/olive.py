"""The graph pass as a pass of Microsoft Olive (`pip install olive-ai`), for workflow files.

Olive finds passes of other packages through a package configuration: `python -m pagegraft.graphpass.olive` prints its
own with this pass added. A workflow then names it:

    python -m pagegraft.graphpass.olive > packages.json
    olive run --config workflow.json --package-config packages.json

where workflow.json has `"passes": {"paged": {"type": "PagegraftPagedAttention", "kv_dtype": "int8"}}`. Parameters are
the fields of `ConvertOptions`. Only Olive imports this module; pagegraft does not depend on it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

try:
    from olive.hardware import AcceleratorSpec
    from olive.model import ONNXModelHandler
    from olive.package_config import OlivePackageConfig
    from olive.passes import Pass
    from olive.passes.pass_config import BasePassConfig, ParamCategory, PassConfigParam
except ModuleNotFoundError as error:
    raise ImportError(f"{__name__} is for Microsoft Olive, which needs '{error.name}': pip install olive-ai") from error

from .options import ConvertOptions
from .output import MODEL_FILE
from .pipeline import convert

__all__ = ["PagegraftPagedAttention", "package_config"]

#: Type and description of each parameter; names and defaults are those of ConvertOptions.
_PARAMETERS: dict[str, tuple[Any, str]] = {
    "fuse": (bool, "Take rotary embedding, q/k norm and the split of QKV into the op where proven equal."),
    "requantize": (bool, "Quantise activations per token where the source does per tensor."),
    "verify": (bool, "Run source and converted model side by side; the pass fails when they differ."),
    "link": (bool, "Hard-link the source's data files instead of copying them."),
    "target": (str, "cpu, ort-cuda or ascend."),
    "max_positions": (int | None, "Longest context in tokens; by default what the source's config.json says."),
    "block_size": (int, "Default number of tokens in a cache block."),
    "kv_dtype": (str | None, "What the caches store: float32, float16, bfloat16, int8, int4 or fp8."),
    "kv_quant": (str | None, "Granularity of cache scales: per-token, per-channel or per-tensor."),
    "kv_scales": (str | None, "File of `pagegraft calibrate` with static scales."),
}


class PagegraftPagedAttention(Pass):  # type: ignore[misc]
    """Rewrites every attention of an ONNX decoder into a PagedAttention op over packed tokens.

    The output is the folder that `pagegraft convert` makes. Raises PagegraftError, as `convert` does.
    """

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        defaults = {field.name: field.default for field in fields(ConvertOptions)}
        parameters = {}
        for name, (kind, description) in _PARAMETERS.items():
            path = {"category": ParamCategory.PATH} if name == "kv_scales" else {}
            parameters[name] = PassConfigParam(
                type_=kind, default_value=defaults[name], description=description, **path
            )
        return parameters

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        values = {name: getattr(config, name) for name in _PARAMETERS}
        if values["kv_scales"] is not None:
            values["kv_scales"] = Path(values["kv_scales"])
        out = Path(output_model_path).with_suffix("")
        convert(model.model_path, out, ConvertOptions(**values))
        beside = sorted(str(file) for file in out.iterdir() if not file.name.startswith(MODEL_FILE))
        attributes = {**(model.model_attributes or {}), "additional_files": beside}
        return ONNXModelHandler(model_path=str(out), onnx_file_name=MODEL_FILE, model_attributes=attributes)


def package_config() -> dict[str, Any]:
    """Olive's own package configuration with this pass added, as `olive run --package-config` reads it."""
    own: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    own["passes"][PagegraftPagedAttention.__name__] = {
        "module_path": f"pagegraft.graphpass.olive.{PagegraftPagedAttention.__name__}",
        "supported_providers": ["*"],
        "supported_accelerators": ["*"],
        "supported_precisions": ["*"],
    }
    return own


if __name__ == "__main__":
    json.dump(package_config(), sys.stdout, indent=2)
