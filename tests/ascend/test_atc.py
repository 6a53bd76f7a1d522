"""The atc command line for a converted model."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from pagegraft.custom_ops.ascend import atc
from pagegraft.custom_ops.ascend.atc import Limits, atc_command
from pagegraft.custom_ops.errors import ContractError
from pagegraft.graphpass import ConvertOptions, convert

ZOO = Path(__file__).parents[1] / "data" / "zoo"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "llama"
    convert(ZOO / "llama_gqa__dyn18", out, ConvertOptions(verify=False))
    return out


def test_every_input_gets_a_shape(converted: Path) -> None:
    command = atc_command(converted, Limits(tokens=512, sequences=8, num_blocks=64, block_size=16))
    shapes = dict(pair.split(":") for pair in command[-1].removeprefix("--input_shape=").split(";"))
    model = onnx.load(converted / "model.onnx", load_external_data=False)
    assert list(shapes) == [value.name for value in model.graph.input]
    assert shapes["input_ids"] == shapes["slot_mapping"] == "1~512"
    assert shapes["cumulative_sequence_lengths"] == "2~9"
    assert shapes["block_table"] == "1~8,1~64"
    assert shapes["past_key_values.0.key"] == "64,16,2,16"
    assert {"--framework=5", "--soc_version=Ascend910B1"} <= set(command)


def test_printed_form_is_one_shell_command(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    atc.main([str(converted), "--soc", "Ascend910B3"])
    line = capsys.readouterr().out
    assert line.startswith("atc --framework=5 ")
    assert line.count("\n") == 1
    assert "--soc_version=Ascend910B3" in line


def test_a_dimension_without_a_rule_is_named() -> None:
    value = helper.make_tensor_value_info("extra", TensorProto.FLOAT, ["surprise", 4])
    with pytest.raises(ContractError, match=r"extra.*surprise"):
        atc._shape(value, {"tokens": "1~2"})
