"""The served model: synthetic, with a tokenizer of one letter or two a token and a small chat template."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

sys.path.insert(0, str(Path(__file__).parent))

from served import Server, pieces, serve

from tests.wiring import synthetic

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if tools %}t{% endif %}a"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = synthetic.build(tmp_path_factory.mktemp("served"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces())}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    yield from serve(model)
