"""Small tokenizers of every kind in use, made on the spot with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't care. Do not wake it!",
    "Paged attention keeps keys and values in blocks; a table says where they are.",
    "Größe, naïve café, smörgåsbord — straße. Zażółć gęślą jaźń. Привет, мир! Γειά σου Κόσμε.",
    "你好，世界。今天天气很好，我们去公园散步吧。 日本語の文章も含まれています。 한국어 문장도 있습니다.",
    "def f(x):\n    return x  +  1\n\n\tprint('tabs  and   spaces ')\n",
    "Emoji: 😀😃🎉 👩‍👩‍👧 🇩🇪 and math ∑∫√ ≤ ≥ ≠. I've said they're fine ' n ' so .",
] * 3

SPECIAL = ["<s>", "</s>", "<unk>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|im_end|>"])
    # Added tokens are no byte spelling: with a space, with characters outside the table, and one that looks like both.
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("→é€"), AddedToken("Ġé")])
    return backend


def _sentencepiece_bpe(*, strips: bool) -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # The alphabet leaves out what only byte tokens can spell: Chinese, Korean, emoji.
    latin = [text.encode("latin-1", "ignore").decode("latin-1").replace(" ", "▁") for text in CORPUS]
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=SPECIAL + BYTES, show_progress=False)
    backend.train_from_iterator(latin, trainer)
    # A trainer makes byte tokens special; in real models they are part of the vocabulary.
    plain = Backend(backend.model)
    plain.normalizer = backend.normalizer
    plain.add_special_tokens(SPECIAL)
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    plain.decoder = decoders.Sequence(stages + ([decoders.Strip(" ", 1, 0)] if strips else []))
    return plain


def _unigram(decoder: decoders.Decoder) -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=SPECIAL + BYTES, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    plain = Backend(backend.model)
    plain.pre_tokenizer = backend.pre_tokenizer
    plain.add_special_tokens(SPECIAL)
    plain.decoder = decoder
    return plain


def _word_piece(*, cleanup: bool) -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["n't", "'s", "do not", "."])
    return backend


def _word_level(decoder: decoders.Decoder | None) -> Backend:
    words = [*SPECIAL, "a", "b", "c</w>", "d</w>", "▁e", "▁", " f ", "é"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    if decoder is not None:
        backend.decoder = decoder
    return backend


MAKERS: dict[str, Callable[[], Backend]] = {
    "byte_level": _byte_level,
    "llama": lambda: _sentencepiece_bpe(strips=True),
    "gemma": lambda: _sentencepiece_bpe(strips=False),
    "unigram": lambda: _unigram(decoders.Metaspace()),
    "unigram_never": lambda: _unigram(decoders.Metaspace(prepend_scheme="never")),
    "unigram_bytes": lambda: _unigram(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "word_piece": lambda: _word_piece(cleanup=True),
    "word_piece_raw": lambda: _word_piece(cleanup=False),
    "no_decoder": lambda: _word_level(None),
    "strip_each": lambda: _word_level(decoders.Sequence([decoders.Strip(" ", 1, 1), decoders.Replace("▁", " ")])),
}

#: Decoders for which the detokenizer has no exact form and looks at a window of tokens.
WINDOWED: dict[str, Callable[[], Backend]] = {
    "bpe_suffix": lambda: _word_level(decoders.BPEDecoder(suffix="</w>")),
    "regex": lambda: _word_level(decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()])),
}
