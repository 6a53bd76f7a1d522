"""Makes golden/smollm2.json: what two programs that are not ours make of the same GGUF file.

Logits are from transformers (its own GGUF reader, float32, eager attention), token ids from llama.cpp's server
(transformers ignores the digit rule that this vocabulary's GGUF file names). Run it in an environment with torch,
transformers, gguf and xllamacpp:

    python tests/examples/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

Last made with torch 2.13.0, transformers 5.24.0, gguf 0.19.0 and xllamacpp 2026.10.11549.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

PROBED_IDS = list(range(0, 49152, 3072))
NUM_DECODED = 6

TEXTS = {
    "plain": "Once upon a time, in a small village by the sea, there lived",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "long": "Count: " + " ".join(f"Line {i}: {7 * i} quick foxes jump over the lazy dog." for i in range(20)),
}
CHATS = {
    "france": [{"role": "user", "content": "What is the capital of France?"}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi 12  3!"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ],
}
STRINGS = [
    "Hello world",
    "Year 1234  56",
    "  7 leading",
    "a1b2c3",
    "3.14159e-10",
    "Don't we've I'LL they're it's",
    "tabs\tand\nnewlines\n\n\n  indented\r\nend ",
    "def f(x):\n    return x**2  # squared\n",
    "naïve café Zürich",
    "日本語のテキスト",
    "Привет, мир!",
    "مرحبا ١٢٣",
    "😀👍🏽 family 👨‍👩‍👧",
    "e\u0301 combining",
    "½ and ² and Ⅷ",
    "x<|im_end|>y",
    "<|endoftext|>",
    "<|im_start",
    '{"a": [1, 2, 3]}',
    "    four spaces, trailing   ",
    "\u00a0nbsp\u2003em\u200bzero",
    "price: $1,234.56!",
    "snake_case CamelCase kebab-case",
    "<file_sep>print()<empty_output>",
    "\x00\x01\x7f",
    "",
    "1\n2\n\n3",
    "   ",
    "don’t ‘quote’ “x”—dash…",
]


def main(gguf: Path) -> None:
    """Write golden/smollm2.json beside this file."""
    serve = _LlamaServer(gguf)
    prompts = dict(TEXTS)
    templates = {}
    for name, messages in CHATS.items():
        rendered = serve.ask("/apply-template", {"messages": messages})["prompt"]
        templates[name] = {"messages": messages, "rendered": rendered}
        prompts[name] = rendered
    ids = {name: serve.tokenise(text) for name, text in prompts.items()}
    golden = {
        "templates": templates,
        "encodings": [{"text": text, "ids": serve.tokenise(text)} for text in STRINGS],
        "probed_ids": PROBED_IDS,
        "logits": {name: {"ids": token_ids, **logits} for name, token_ids, logits in _logits(gguf, ids)},
    }
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":"))
    (Path(__file__).parent / "golden" / "smollm2.json").write_text(text + "\n")


class _LlamaServer:
    def __init__(self, gguf: Path) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(gguf)
        parameters.n_ctx = 512
        parameters.warmup = False
        self._server = xllamacpp.Server(parameters)

    def ask(self, path: str, body: dict[str, object]) -> dict:
        request = urllib.request.Request(
            self._server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokenise(self, text: str) -> list[int]:
        return self.ask("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]


def _logits(gguf: Path, prompts: dict[str, list[int]]):
    """Per prompt: greedy continuation, and of each position from the prompt's last on, top ids and probed logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, ids in prompts.items():
        with torch.no_grad():
            continuation: list[int] = []
            rows = []
            for _ in range(NUM_DECODED):  # without a cache: every row from the whole text
                output = model(torch.tensor([ids + continuation]), use_cache=False).logits[0]
                rows.append(output[-1])
                continuation.append(int(rows[-1].argmax()))
            early = model(torch.tensor([ids]), use_cache=False).logits[0, len(ids) // 2]
        yield (
            name,
            ids,
            {
                "continuation": continuation,
                "middle": [round(float(early[i]), 5) for i in PROBED_IDS],
                "top": [[int(i) for i in row.topk(5).indices] for row in rows],
                "top_values": [[round(float(v), 5) for v in row.topk(5).values] for row in rows],
                "probed": [[round(float(row[i]), 5) for i in PROBED_IDS] for row in rows],
            },
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
