"""The atc command line that compiles a converted model for an Ascend device, with the ranges of its dynamic dimensions.

`python -m pagegraft.custom_ops.ascend.atc MODEL_FOLDER` prints it. atc itself comes with CANN and is not needed here.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ..errors import ContractError
from ..manifest import MANIFEST_FILE, Manifest

__all__ = ["Limits", "atc_command", "main"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest step that the compiled model has to take; `num_blocks` and `block_size` are fixed in it."""

    tokens: int = 2048
    sequences: int = 256
    num_blocks: int = 2048
    block_size: int = 128
    soc: str = "Ascend910B1"


def atc_command(folder: Path, limits: Limits) -> list[str]:
    """The command for the converted model in `folder`. Raises ContractError when it has a dimension without a rule."""
    manifest = Manifest.load(folder)
    model = onnx.load(folder / manifest.model_file, load_external_data=False)
    longest = manifest.max_positions or limits.num_blocks * limits.block_size
    width = -(-longest // limits.block_size)
    ranges = {
        "tokens": f"1~{limits.tokens}",
        "sequences": f"1~{limits.sequences}",
        "sequences_plus_one": f"2~{limits.sequences + 1}",
        "rows": f"1~{limits.sequences}",
        "block_table_width": f"1~{min(width, limits.num_blocks)}",
        "num_blocks": str(limits.num_blocks),
        "block_size": str(limits.block_size),
    }
    shapes = [f"{value.name}:{_shape(value, ranges)}" for value in model.graph.input]
    return [
        "atc",
        "--framework=5",
        f"--model={folder / manifest.model_file}",
        f"--output={folder / 'model'}",
        f"--soc_version={limits.soc}",
        "--input_format=ND",
        f"--input_shape={';'.join(shapes)}",
    ]


def _shape(value: onnx.ValueInfoProto, ranges: dict[str, str]) -> str:
    dims = []
    for dim in value.type.tensor_type.shape.dim:
        if dim.dim_param and dim.dim_param not in ranges:
            raise ContractError(
                f"input '{value.name}' has the dynamic dimension '{dim.dim_param}', for which there is no range; "
                f"known are {', '.join(ranges)}"
            )
        dims.append(ranges[dim.dim_param] if dim.dim_param else str(dim.dim_value))
    return ",".join(dims)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the command for the folder given on the command line."""
    parser = argparse.ArgumentParser(prog="python -m pagegraft.custom_ops.ascend.atc", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"a converted model (the folder with {MANIFEST_FILE})")
    parser.add_argument("--tokens", type=int, default=Limits.tokens, help="new tokens of a step")
    parser.add_argument("--sequences", type=int, default=Limits.sequences, help="sequences of a step")
    parser.add_argument("--num-blocks", type=int, default=Limits.num_blocks, help="blocks of the pool")
    parser.add_argument("--block-size", type=int, default=Limits.block_size, help="tokens of a block")
    parser.add_argument("--soc", default=Limits.soc, help="atc's name of the device")
    a = parser.parse_args(arguments)
    limits = Limits(tokens=a.tokens, sequences=a.sequences, num_blocks=a.num_blocks, block_size=a.block_size, soc=a.soc)
    print(shlex.join(atc_command(a.folder, limits)))


if __name__ == "__main__":
    main()
