"""The graph pass itself: analyse a model without touching it, then rewrite it in place.

`PagedAttentionPass` is an `onnx_ir.passes.InPlacePass`: it plugs into any onnx_ir pipeline.
"""

from __future__ import annotations

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names

from .analysis import Analysis, analyse
from .normalise import normalise
from .options import ConvertOptions
from .rewrite.model import rewrite

__all__ = ["Analysis", "PagedAttentionPass", "analyse", "rewrite"]


class PagedAttentionPass(ir.passes.InPlacePass):
    """Rewrites a decoder in place: every attention becomes one PagedAttention node over packed tokens.

    Raises NotConvertible, with the model as it was, when a correct packed version cannot be built. After a run
    `analysis` and `layers` hold what was found.
    """

    def __init__(self, options: ConvertOptions | None = None) -> None:
        super().__init__()
        self.options = options or ConvertOptions()
        self.analysis: Analysis | None = None
        self.layers: tuple[names.CacheLayer, ...] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Analyses and rewrites the model."""
        work = model.clone()  # shares the weights
        normalise(work, requantize=self.options.requantize)
        self.analysis = analyse(work, self.options, max_positions=self.options.max_positions)
        self.layers = rewrite(work, self.analysis, self.options.target)
        model.graph = work.graph
        model.functions.clear()
        model.functions.update(work.functions)
        return ir.passes.PassResult(model, modified=True)
