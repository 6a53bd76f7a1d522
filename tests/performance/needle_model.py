"""A decoder whose right answers at any length are known, exported by torch: it copies what followed a token earlier.

Two layers of grouped attention with rotary embedding on half of each head, no training. In each layer head 0 is set
by hand and head 1 at random; both share keys and values.

* Layer 0, head 0 looks at the token before (its rotary part peaks at a distance of one), and notes that token's code.
* Layer 1, head 0 looks for tokens whose predecessor has the code of the current token, and answers with theirs.
* The heads 1 mix the whole context into the answer: all of it matters to the logits, and where it is too.

So after a token that stood at one place before, the greedy continuation is what followed it there. Codes are rows of
a Hadamard matrix and their negatives: all equally long, orthogonal or opposite.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tests.model.export_modules import Norm, causal, half_rotary

__all__ = ["HEAD_SIZE", "LAYERS", "VOCAB", "exact_logits", "export_needle_model"]

CODE = 32  # size of a token's code
VOCAB = 2 * CODE
HEADS, LAYERS, HEAD_SIZE = 2, 2, 64
ROTARY = HEAD_SIZE // 2
#: Channels of the residual stream: code of the token, of the one before, the answer, what the random heads wrote, 1.
TOKEN, BEFORE, ANSWER, MIXED = (slice(i * CODE, (i + 1) * CODE) for i in range(4))
ONE = 4 * CODE
HIDDEN = ONE + 8
_PEAK = 80.0  # score of the token before, layer 0
_MATCH = 30.0  # score of a match, layer 1
_RANDOM = 4.0  # spread of the random heads' scores
_SHARE = 1.0  # of the random heads in the answer


class _Attention(nn.Module):
    """Query heads on one key head; the first half of each head is rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_SIZE, bias=False)
        self.k = nn.Linear(HIDDEN, HEAD_SIZE, bias=False)
        self.v = nn.Linear(HIDDEN, HEAD_SIZE, bias=False)
        self.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, positions: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`x` `[B, T, C]`, caches `[B, 1, T, D]`."""
        batch, new, _ = x.shape
        q, k = self.q(x).view(batch, new, HEADS, HEAD_SIZE), self.k(x).view(batch, new, 1, HEAD_SIZE)
        q = torch.cat([half_rotary(q[..., :ROTARY], positions), q[..., ROTARY:]], -1).transpose(1, 2)
        k = torch.cat([half_rotary(k[..., :ROTARY], positions), k[..., ROTARY:]], -1).transpose(1, 2)
        v = self.v(x).view(batch, new, 1, HEAD_SIZE).transpose(1, 2)
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * HEAD_SIZE**-0.5 + bias, -1)
        mixed = torch.matmul(weights, v).transpose(1, 2).reshape(batch, new, HEADS * HEAD_SIZE)
        return self.out(mixed), [k, v]


class _Needle(nn.Module):
    """Embedding, two layers, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(_Attention() for _ in range(LAYERS))
        self.norms = nn.ModuleList(Norm(HIDDEN) for _ in range(LAYERS + 1))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Logits and caches."""
        hidden = self.embed(input_ids)
        bias = causal(attention_mask, input_ids.shape[1])
        present: list[torch.Tensor] = []
        for i, layer in enumerate(self.layers):
            mixed, caches = layer(self.norms[i](hidden), bias, position_ids, (past[2 * i], past[2 * i + 1]))
            hidden = hidden + mixed
            present += caches
        return (self.head(self.norms[-1](hidden)), *present)


def _codes() -> NDArray[np.float32]:
    """`[VOCAB, CODE]`, entries of 1 and -1."""
    rows = np.ones((1, 1), np.float32)
    while len(rows) < CODE:
        rows = np.block([[rows, rows], [rows, -rows]])
    return np.concatenate([rows, -rows])


def _previous_token(layer: _Attention, rng: np.random.Generator) -> None:
    """Layer 0. Its input is normed: codes and the constant there have the root mean square of 1 as their unit."""
    unit = _unit(1)
    angle = 1e4 ** (-np.arange(ROTARY // 2) / (ROTARY // 2))
    ahead = np.concatenate([np.cos(angle), -np.sin(angle)])  # what lies one position back is turned into `still`
    still = np.concatenate([np.ones(ROTARY // 2), np.zeros(ROTARY // 2)])
    strength = math.sqrt(_PEAK * math.sqrt(HEAD_SIZE) / (ROTARY // 2)) / unit
    q, k, v, out = _weights(layer)
    q[:ROTARY, ONE], k[:ROTARY, ONE] = strength * ahead, strength * still
    k[ROTARY:, TOKEN] = np.eye(CODE) / unit
    v[:CODE, TOKEN], v[CODE:, TOKEN] = np.eye(CODE) / unit, rng.standard_normal((CODE, CODE)) / unit / math.sqrt(CODE)
    q[HEAD_SIZE + ROTARY :, TOKEN] = _random_scores(rng, unit)
    out[BEFORE, :CODE] = np.eye(CODE)
    out[MIXED, HEAD_SIZE + CODE :] = np.eye(CODE)
    _set(layer, q, k, v, out)


def _induction(layer: _Attention, rng: np.random.Generator) -> None:
    """Layer 1. The random head sees codes by way of the rotary part, so that distance matters to it."""
    unit = _unit(2)
    strength = math.sqrt(_MATCH * math.sqrt(HEAD_SIZE) / CODE) / unit
    q, k, v, out = _weights(layer)
    q[ROTARY:HEAD_SIZE, TOKEN] = k[ROTARY:, BEFORE] = strength * np.eye(CODE)
    k[:ROTARY, TOKEN] = np.eye(CODE) / unit
    q[HEAD_SIZE : HEAD_SIZE + ROTARY, TOKEN] = _random_scores(rng, unit)
    v[:CODE, TOKEN] = np.eye(CODE) / unit
    v[CODE:, MIXED] = v[CODE:, TOKEN] = rng.standard_normal((CODE, CODE)) / unit / math.sqrt(CODE)
    out[ANSWER, :CODE] = np.eye(CODE)
    out[ANSWER, HEAD_SIZE + CODE :] = _SHARE * np.eye(CODE)
    _set(layer, q, k, v, out)


def _unit(codes: int) -> float:
    """What an entry of a code becomes in the norm of a hidden state that holds so many codes and the constant."""
    return 1.0 / math.sqrt((codes * CODE + 1) / HIDDEN)


def _random_scores(rng: np.random.Generator, unit: float) -> NDArray[np.float64]:
    """A map of codes to queries whose scores with codes spread by `_RANDOM`."""
    return rng.standard_normal((CODE, CODE)) * _RANDOM * math.sqrt(HEAD_SIZE) / CODE / unit


def _weights(layer: _Attention) -> list[NDArray[np.float64]]:
    return [np.zeros(linear.weight.shape) for linear in (layer.q, layer.k, layer.v, layer.out)]


def _set(layer: _Attention, *weights: NDArray[np.float64]) -> None:
    for linear, weight in zip((layer.q, layer.k, layer.v, layer.out), weights, strict=True):
        linear.weight.copy_(torch.from_numpy(weight))


def _make(seed: int) -> _Needle:
    rng = np.random.default_rng(seed)
    model, codes = _Needle().eval(), torch.from_numpy(_codes())
    with torch.no_grad():
        model.embed.weight.zero_()
        model.embed.weight[:, TOKEN] = codes
        model.embed.weight[:, ONE] = 1.0
        _previous_token(model.layers[0], rng)
        _induction(model.layers[1], rng)
        model.head.weight.zero_()
        model.head.weight[:, ANSWER] = codes * 0.3
    return model


def exact_logits(tokens: Sequence[int], past: Sequence[NDArray[np.float32]], seed: int = 0) -> NDArray[np.float64]:
    """`[tokens, vocab]` in float64 behind the caches given; the angles of positions are rounded as the export's are."""
    model, caches = _make(seed).double(), [torch.from_numpy(array).double() for array in past]
    done = caches[0].shape[2]
    end = done + len(tokens)
    with torch.no_grad():
        logits = model(
            torch.tensor([list(tokens)]), torch.ones(1, end, dtype=torch.int64), torch.arange(done, end)[None], *caches
        )[0]
    out: NDArray[np.float64] = logits[0].numpy()
    return out


def export_needle_model(folder: Path, *, max_positions: int, seed: int = 0) -> Path:
    """Writes model.onnx (past tensors, open batch and lengths) and config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    past = [torch.zeros(1, 1, 5, HEAD_SIZE) for _ in range(2 * LAYERS)]
    args = (torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64), torch.arange(5, 8)[None], *past)
    pasts = [f"past_key_values.{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]
    presents = [name.replace("past_key_values", "present") for name in pasts]
    axes = {name: {0: "batch", 1: "new"} for name in ("input_ids", "position_ids", "logits")}
    axes["attention_mask"] = {0: "batch", 1: "total"}
    axes |= {name: {0: "batch", 2: "past"} for name in pasts} | {name: {0: "batch", 2: "total"} for name in presents}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _make(seed),
            args,
            str(folder / "model.onnx"),
            dynamo=False,
            opset_version=18,
            input_names=["input_ids", "attention_mask", "position_ids", *pasts],
            output_names=["logits", *presents],
            dynamic_axes=axes,
        )
    config = {"max_position_embeddings": max_positions, "vocab_size": VOCAB, "model_type": "needle"}
    (folder / "config.json").write_text(json.dumps(config) + "\n")
    return folder
