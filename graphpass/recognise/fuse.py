"""Takes rotary embedding and q/k norm into the op, where evaluation proves that they are what the op computes.

Upstream of an operand, the farthest value is sought from which the operand is `gain * rotate(rms_norm(x) * weight)` per
head. Fed with unit vectors the region shows pairing, rotated channels, gains and weights; a sweep over all positions
gives the tables; random inputs at many sizes prove the result. What is not proven stays in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import NotConvertible
from ..evaluate import Array, Unevaluable
from ..graph import is_constant, node_inputs
from .probe import Probe, Size
from .rotation import HeadForm, Place, apply_form, norms_agree, pair_gain, pairs, rotated_channels
from .site import AttentionSite, Operand, Rotary
from .sizes import reachable_integers

__all__ = ["Fuser"]

#: Largest pair of tables, in bytes, worth keeping in the model.
_LARGEST_TABLES = 160 << 20
#: Tokens of one run of the sweep over positions.
_SWEEP = 4096


class Fuser:
    """Fuses the sites of one model; tables are swept once for all layers that compute them from the same values."""

    def __init__(self, probe: Probe, longest: int) -> None:
        self._probe = probe
        self._longest = longest
        self._tables: dict[tuple[Any, ...], tuple[Array, Array]] = {}

    def fuse(self, site: AttentionSite) -> AttentionSite:
        """The site with its query and key taken from farther upstream, or unchanged."""
        if site.latent or site.rotary is not None or site.query.value is None or site.key.value is None:
            return site
        try:
            return self._fuse(site)
        except Unevaluable:
            return site

    def _fuse(self, site: AttentionSite) -> AttentionSite:
        for query_form in self._forms(site.query):
            for key_form in self._forms(site.key):
                if query_form.shape != key_form.shape or not norms_agree(query_form, key_form):
                    continue
                fused = self._try(site, query_form, key_form)
                if fused is not None:
                    return fused
        return site

    def _try(self, site: AttentionSite, query: HeadForm, key: HeadForm) -> AttentionSite | None:
        if query.width * self._longest * 4 > _LARGEST_TABLES:
            return None
        source = (key.shape, self._structural_inputs(site.key, key.value))
        cos, sin = self._tables.get(source) or self._sweep(site.key, key)
        for operand, form in ((site.query, query), (site.key, key)):
            if not self._proven(operand, form, cos, sin):
                return None
        self._tables[source] = (cos, sin)  # only now: a wrong form sweeps wrong tables
        return replace(
            site,
            query=_moved_up(site.query, query),
            key=_moved_up(site.key, key),
            rotary=Rotary(cos=cos, sin=sin, interleaved=query.interleaved, offset=query.offset)
            if query.width
            else None,
            q_norm=query.weight,
            k_norm=key.weight,
            norm_epsilon=query.epsilon if query.weight is not None else site.norm_epsilon,
        )

    def _forms(self, operand: Operand) -> list[HeadForm]:
        """Forms of all candidates upstream, farthest first."""
        if operand.value is None:
            return []
        tokens = 3
        count = tokens * operand.heads * operand.size
        forms: list[HeadForm] = []
        for value in reversed(self._probe.view.dominators(operand.value)[1:]):
            try:
                if int(np.prod(self._probe.shape(value, tokens, 0))) != count:
                    continue
                form = self._form(operand, value)
            except NotConvertible:
                continue
            if form is not None:
                forms.append(form)
        return forms

    def _run(self, operand: Operand, place: Place, x_THD: Array, past: int) -> Array:
        """The operand `[T, heads, size]` in float64 for given vectors at the candidate."""
        value = place.value
        target = operand.value
        if target is None:
            raise Unevaluable("an operand has no value of its own")
        tokens = x_THD.shape[0]
        shape = self._probe.shape(value, tokens, 0)
        x = x_THD if place.perm is None else x_THD.transpose(1, 0, 2)
        given = {value: x.astype(self._probe.dtype(value)).reshape(shape)}
        out = self._probe.region([target], given, tokens, past)[0]
        if operand.perm is not None:
            out = out.transpose(operand.perm)
        if out.size != x_THD.size:
            raise Unevaluable("an operand has more tokens than are new")
        return out.reshape(tokens, operand.heads, operand.size).astype(np.float64)

    def _matrix(self, operand: Operand, place: Place, tokens: int, past: int) -> Array:
        """The matrix `[out, in]` of the region at the last token, over unit vectors: each head is given another one,
        as if all heads did the same (which `_proven` then shows)."""
        matrix = np.zeros((operand.size, operand.size))
        for start in range(0, operand.size, operand.heads):
            channels = np.arange(start, min(start + operand.heads, operand.size))
            units = np.zeros((tokens, operand.heads, operand.size))
            units[:, channels - start, channels] = 1.0
            matrix[:, channels] = self._run(operand, place, units, past)[-1, channels - start].T
        return matrix

    def _place(self, operand: Operand, value: ir.Value) -> Place | None:
        """How heads and tokens lie in a candidate, from its shape."""
        affine = self._probe.affine(value) or ()
        tokens = [axis for axis, dim in enumerate(affine) if dim == (0, 1, 0)]
        if len(tokens) != 1:
            return None
        behind = int(np.prod([constant for constant, _, _ in affine[tokens[0] + 1 :]]))
        if behind == operand.heads * operand.size:
            return Place(value, None)
        heads_first = self._probe.shape(value, 5, 0) == (1, operand.heads, 5, operand.size)
        return Place(value, (0, 2, 1, 3)) if heads_first else None

    def _form(self, operand: Operand, value: ir.Value) -> HeadForm | None:
        place = self._place(operand, value)
        if place is None:
            return None
        zero = np.zeros((3, operand.heads, operand.size))
        if np.any(self._run(operand, place, zero, 0)):
            return None
        x = np.random.default_rng(5).standard_normal(zero.shape)
        once, twice = self._run(operand, place, x, 0), self._run(operand, place, 2 * x, 0)
        half = self._probe.dtype(value) == np.float16
        close = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-4}
        normed = np.allclose(once, twice, **close)  # type: ignore[arg-type]
        if not normed and not np.allclose(2 * once, twice, **close):  # type: ignore[arg-type]
            return None
        new, past = (3, 0) if not self._probe.has_past else (2, 3)
        matrix = self._matrix(operand, place, new, past)
        start = self._matrix(operand, place, 1, 0)
        return self._read_form(operand, place, matrix, start, normed=bool(normed))

    def _read_form(
        self, operand: Operand, place: Place, later: Array, start: Array, *, normed: bool
    ) -> HeadForm | None:
        """Pairing, gain and norm weight from the matrices at a later position and at position 0."""
        size = operand.size
        own = np.diag(start)
        if not np.allclose(start, np.diag(own), atol=1e-3) or np.any(np.abs(own) < 1e-6):
            return None
        rotated = rotated_channels(later / own)
        if rotated is None:
            return None
        interleaved, offset, width = rotated
        if normed:
            epsilon = self._epsilon(operand, place, own / np.sqrt(size))
            if epsilon is None:
                return None
            weight = own * np.sqrt(1.0 / size + epsilon)  # a unit vector's mean square is 1 / size
            return HeadForm(place.value, place.perm, interleaved, offset, width, 1.0, weight, epsilon)
        gain = float(own[0] if offset or width == 0 else own[-1])
        if not np.allclose(own, gain, rtol=1e-3):
            return None
        if width == 0 and self._probe.affine(place.value) == self._probe.affine(operand.value):  # type: ignore[arg-type]
            return None
        return HeadForm(place.value, place.perm, interleaved, offset, width, gain, None, 0.0)

    def _epsilon(self, operand: Operand, place: Place, weight: Array) -> float | None:
        """The norm's epsilon from a vector small enough to feel it, as the constant of the region that it must be."""
        small = 1e-3
        x = np.full((1, operand.heads, operand.size), small)
        out = self._run(operand, place, x, 0)[0, 0] / weight
        ratio = float(np.median(np.abs(out)))
        if not 0.0 < ratio < 1.0:
            return None
        fitted = small**2 * (1.0 / ratio**2 - 1.0)
        constants = self._constants(operand, place.value)
        near = [c for c in constants if abs(c - fitted) <= 0.05 * fitted]
        return near[0] if near else None

    def _constants(self, operand: Operand, value: ir.Value) -> list[float]:
        found: list[float] = []
        for node in self._probe.view.between([value], operand.value):  # type: ignore[arg-type]
            if "epsilon" in node.attributes:
                found.append(node.attributes["epsilon"].as_float())
            elif node.op_type in ("RMSNormalization", "SimplifiedLayerNormalization"):
                found.append(1e-5)
            for operand_value in node.inputs:
                if operand_value is not None and is_constant(operand_value):
                    tensor = operand_value.const_value
                    if tensor is not None and tensor.size == 1 and tensor.dtype.is_floating_point():
                        found.append(float(tensor.numpy().reshape(-1)[0]))
        return found

    def _sweep(self, operand: Operand, form: HeadForm) -> tuple[Array, Array]:
        """Cosine and sine tables `[positions, width / 2]` at every position, from one vector that shows both."""
        if form.width == 0:
            return np.zeros((0, 0)), np.zeros((0, 0))
        first, second = pairs(form.interleaved, form.offset, form.width)
        x = np.zeros(operand.size)
        x[first] = 1.0
        factor = form.gain
        if form.weight is not None:
            factor = form.weight[first] / np.sqrt(len(first) / operand.size + form.epsilon)
        cos, sin = [], []
        step = _SWEEP if self._probe.has_past else self._longest
        for past in range(0, self._longest, step):
            tokens = min(step, self._longest - past)
            out = self._run(operand, form.place, np.broadcast_to(x, (tokens, operand.heads, operand.size)), past)
            cos.append(out[:, 0, first] / factor)
            sin.append(out[:, 0, second] / pair_gain(form, operand, first, second))
        kind = self._probe.dtype(form.value)
        return np.concatenate(cos).astype(kind), np.concatenate(sin).astype(kind)

    def _structural_inputs(self, operand: Operand, value: ir.Value) -> tuple[bytes, ...]:
        """What tells regions with the same tables: the structural values they read, at two sizes."""
        view = self._probe.view
        found: dict[ir.Value, None] = {}
        for node in view.between([value], operand.value):  # type: ignore[arg-type]
            found.update((v, None) for v in node_inputs(node) if not view.taint(v) and not is_constant(v))
        sizes = ((3, 5), (1, self._longest - 1)) if self._probe.has_past else ((7, 0), (min(self._longest, 64), 0))
        arrays = [array for size in sizes for array in self._probe.structural(list(found), *size)] if found else []
        return tuple(sorted({array.tobytes() for array in arrays if array.dtype.kind == "f"}))

    def _proven(self, operand: Operand, form: HeadForm, cos: Array, sin: Array) -> bool:
        """Random vectors at many sizes, around every constant that the region's tables reach."""
        rng = np.random.default_rng(11)
        half = self._probe.dtype(form.value) == np.float16
        for new, past in self._sizes(operand, form.value):
            x = rng.standard_normal((new, operand.heads, operand.size)) * (0.02 if form.weight is not None else 1.0)
            x = x.astype(self._probe.dtype(form.value)).astype(np.float64)
            actual = self._run(operand, form.place, x, past)
            expected = apply_form(form, x, cos, sin, past)
            tolerance = 2e-2 if half else 2e-4
            if not np.allclose(actual, expected, rtol=tolerance, atol=tolerance * float(np.abs(expected).max())):
                return False
        return True

    def _sizes(self, operand: Operand, value: ir.Value) -> Sequence[Size]:
        if not self._probe.has_past:
            return [(5, 0), (17, 0), (min(self._longest, 1024), 0)]
        nodes = self._probe.view.between([value], operand.value)  # type: ignore[arg-type]
        structural = [v for n in nodes for v in node_inputs(n) if not self._probe.view.taint(v)]
        sizes: dict[Size, None] = dict.fromkeys([(5, 0), (3, 4), (1, 29), (4, min(60, self._longest - 4))])
        sizes[(1, self._longest - 1)] = None
        for c in sorted(reachable_integers(structural, set())):
            if 4 <= c < self._longest - 2:
                sizes.update(dict.fromkeys([(2, c - 2), (2, c - 1), (1, c + 1)]))
        return [(n, p) for n, p in sizes if p >= 0 and n + p <= self._longest]


def _rotary(form: HeadForm, cos: Array, sin: Array) -> Rotary | None:
    return Rotary(cos=cos, sin=sin, interleaved=form.interleaved, offset=form.offset) if form.width else None


def _moved_up(operand: Operand, form: HeadForm) -> Operand:
    return replace(operand, value=form.value, perm=form.perm, scale=operand.scale * form.gain)
