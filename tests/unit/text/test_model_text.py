"""What a model's folder says about text, and what is said when it says nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pagegraft.runtime.text import ChatTemplateError, ModelText, Tokenizer, TokenizerError
from small_tokenizers import MAKERS

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]


def folder(path: Path, **files: Any) -> ModelText:
    """A folder with a byte-level tokenizer and the given JSON files (`_` for `.` at the end of the name)."""
    MAKERS["byte_level"]().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ModelText(path)


def test_end_of_sequence_comes_from_all_places_that_name_it(tmp_path: Path) -> None:
    text = folder(
        tmp_path,
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": [7, 8]},
        tokenizer_config={"eos_token": {"content": "</s>"}},
    )
    assert text.eos_token_ids == {7, 8, 1}


@pytest.mark.parametrize("value", [2, [2]])
def test_end_of_sequence_of_the_config_counts_where_generation_config_has_none(tmp_path: Path, value: Any) -> None:
    text = folder(tmp_path, config={"eos_token_id": value}, generation_config={"eos_token_id": None})
    assert text.eos_token_ids == {2}


def test_a_folder_of_nothing_but_a_model_works_until_text_is_needed(tmp_path: Path) -> None:
    text = ModelText(tmp_path)
    assert not text.has_tokenizer
    assert text.eos_token_ids == frozenset()
    assert text.generation_config == {}
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*take prompts as token ids"):
        _ = text.tokenizer
    with pytest.raises(ChatTemplateError, match=r"no chat template.*--chat-template"):
        _ = text.chat_template


def test_a_sentencepiece_model_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(TokenizerError, match=r"sentencepiece tokenizer\.model.*AutoTokenizer"):
        _ = ModelText(tmp_path).tokenizer


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    text = ModelText(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read by tokenizers"):
        _ = text.tokenizer
    with pytest.raises(TokenizerError, match=r"generation_config\.json is not valid JSON"):
        _ = text.generation_config
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json holds no JSON object"):
        _ = text.tokenizer_config


def test_template_of_the_tokenizer_config(tmp_path: Path) -> None:
    text = folder(tmp_path, tokenizer_config={"chat_template": TEMPLATE, "bos_token": "<s>"})
    assert text.chat_template.render(HI) == "<s>Hi"


def test_template_file_goes_before_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}", encoding="utf-8")
    text = folder(tmp_path, tokenizer_config={"chat_template": TEMPLATE})
    assert text.chat_template.render(HI) == "file: Hi"


def test_template_of_its_own_json(tmp_path: Path) -> None:
    assert folder(tmp_path, chat_template={"chat_template": TEMPLATE}).chat_template.render(HI) == "Hi"


def test_tools_go_to_the_one_template_of_a_model_that_has_one(tmp_path: Path) -> None:
    text = folder(tmp_path, tokenizer_config={"chat_template": TEMPLATE})
    assert text.chat_template_for(tools=True).render(HI) == "Hi"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    text = folder(tmp_path, tokenizer_config={"chat_template": named})
    assert text.chat_template.render(HI) == "plain"
    assert text.named_chat_template("tool_use").render(HI) == "tools"
    assert text.named_chat_template("rag").render(HI) == "rag"
    assert text.chat_template_for(tools=True).render(HI) == "tools"
    assert text.chat_template_for(tools=False).render(HI) == "plain"
    with pytest.raises(ChatTemplateError, match="called 'x'; it has default, rag, tool_use"):
        text.named_chat_template("x")


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = MAKERS["byte_level"]()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ModelText(tmp_path).tokenizer
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.encode(text) == MAKERS["byte_level"]().encode(text).ids


def test_special_tokens_in_and_out(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = tokenizer.encode("<s>the dog</s>", add_special_tokens=False)
    assert ids[0] == tokenizer.token_to_id("<s>")
    assert tokenizer.decode(ids) == "the dog"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the dog</s>"
    assert tokenizer.id_to_token(tokenizer.vocab_size - 1) is not None
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None


def test_ids_that_are_no_ids_are_an_error(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match="cannot be decoded"):
        tokenizers_by_kind["byte_level"].decode([-1])


def test_other_threads_run_while_a_long_text_is_encoded(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    thread = threading.Thread(target=tokenizers_by_kind["byte_level"].encode, args=("the dog " * 100_000,))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10


def test_text_that_is_no_unicode_is_an_error(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match="is not Unicode text"):
        tokenizers_by_kind["byte_level"].encode("a\ud83d")
