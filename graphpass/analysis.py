"""Everything known of a model before the first edit: every attention accepted, every other value proven."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names

from .errors import NotConvertible
from .graph import GraphView
from .io_contract import SourceInterface, classify
from .options import ConvertOptions
from .paging.interface import PagedInterface, paged_interface
from .recognise.attention import find_score_anchors, recognise_scores
from .recognise.cache import CacheIndex, resolve_cache_shapes
from .recognise.fuse import Fuser
from .recognise.fuse_parts import fuse_parts
from .recognise.fused import find_grouped, recognise_grouped
from .recognise.pack import pack_operands
from .recognise.probe import Probe
from .recognise.site import AttentionSite
from .recognise.structure import StructurePlan, plan_structure
from .refuse import refuse_operators
from .requantise import PER_TENSOR_OPS, requantised_activations
from .rewrite.insert_op import assign_groups
from .rewrite.logits_rows import LogitsPlan, plan_logits
from .rewrite.shared import cache_owners

__all__ = ["Analysis", "analyse"]

#: Longest context probed when nobody states one.
DEFAULT_LONGEST = 2048
#: Rows of rotary tables when neither the source nor the user states the longest context.
UNSTATED_BOUND = 32768


@dataclass(frozen=True)
class Analysis:
    """All that is known of a model before the first edit: every attention accepted, every other value proven."""

    probe: Probe
    sites: tuple[AttentionSite, ...]
    structure: StructurePlan
    logits: LogitsPlan
    groups: tuple[names.CacheGroup, ...]
    max_positions: int | None
    input_names: tuple[str, ...] = ()
    token_count: int = 0
    context_unstated: bool = False
    requantised: int = 0
    compute_dtype: ir.DataType = field(default=ir.DataType.FLOAT)
    pages: PagedInterface | None = None

    @property
    def accuracy(self) -> str:
        """The key of verification tolerances: the compute type, or what limits accuracy more."""
        for node in self.probe.view.order:
            level = node.attributes.get("accuracy_level")
            if node.op_type == "MatMulInteger" or (level is not None and level.as_int() == 4):
                return "int8 products"
        return str(self.compute_dtype.numpy())

    @property
    def positions(self) -> Literal["position_ids", "past", "none"]:
        """Which source of token positions the converted graph reads."""
        if not self.structure.position_free:
            return "position_ids"
        return "past" if any(site.rotary is not None for site in self.sites) else "none"

    @property
    def interface(self) -> SourceInterface:
        """Roles of the source's inputs and outputs."""
        return self.probe.interface


def analyse(model: ir.Model, options: ConvertOptions, *, max_positions: int | None = None) -> Analysis:
    """Recognises everything in a normalised model without changing it. Raises NotConvertible with the reason."""
    pages = paged_interface(model.graph)
    if pages is None:
        return _analyse(model, options, max_positions, None)
    refusal: NotConvertible | None = None
    for reading in pages.readings():  # what an input means shows in what is attended to with it
        try:
            return _analyse(model, options, max_positions, reading)
        except NotConvertible as error:
            refusal = refusal or error
    raise refusal or NotConvertible("no input of the pages has a meaning", kind="pages")


def _analyse(
    model: ir.Model, options: ConvertOptions, max_positions: int | None, pages: PagedInterface | None
) -> Analysis:
    interface = classify(model.graph, pages)
    view = GraphView(model.graph, [interface.tokens], interface.caches)
    refuse_operators(model)
    refuse_batch_global_ops(model)
    probe = Probe(model, view, interface)
    caches = CacheIndex(view, interface)
    resolve_cache_shapes(probe, caches)
    anchors, grouped = find_score_anchors(view, caches), find_grouped(model.graph)
    if not anchors and not grouped:  # said before it is run: what is no decoder need not take a decoder's inputs
        raise NotConvertible(
            "no attention was found"
            if interface.caches
            else "this does not look like a decoder: no attention was found, and no caches",
            hint="only decoder language models with attention can be converted",
            kind="no-attention",
        )
    probe.measure()
    longest = max_positions or DEFAULT_LONGEST
    sites = [recognise_scores(probe, caches, anchor, longest) for anchor in anchors]
    sites += [recognise_grouped(probe, caches, node) for node in grouped]
    sites.sort(key=lambda site: view.order[site.node])
    check_caches_are_explained(caches, sites)
    limits = [site.score.limit for site in sites if site.score.limit is not None]
    structure = plan_structure(probe, sites, min([longest, *limits]))
    bound = min([n for n in (structure.limit, max_positions, *limits) if n is not None], default=UNSTATED_BOUND)
    if options.fuse and options.target != "ascend":  # its kernel has neither rotary embedding nor norms
        fuser = Fuser(probe, bound)
        sites = [fuse_parts(fuser, site) if site.key.parts else fuser.fuse(site) for site in sites]
        sites = pack_operands(probe, sites, cache_owners(sites))
        if any(site.rotary is not None for site in sites):
            structure = plan_structure(probe, sites, bound)
            limits.append(bound)
    limits += [n for n in (structure.limit, max_positions) if n is not None]
    plan = plan_logits(probe)
    return Analysis(
        probe=probe,
        sites=tuple(sites),
        structure=structure,
        logits=plan,
        groups=assign_groups(sites),
        max_positions=min(limits, default=None),
        token_count=min(plan.vocab, token_rows(interface.tokens) or plan.vocab),
        context_unstated=bound == UNSTATED_BOUND and max_positions is None,
        requantised=requantised_activations(model),
        input_names=tuple(v.name or "" for v in model.graph.inputs),
        compute_dtype=ir.DataType.from_numpy(probe.dtype(sites[0].operands[0])),
        pages=pages,
    )


def token_rows(tokens: ir.Value) -> int | None:
    """Rows of the table that tokens are looked up in, when it is constant: how many different tokens there are."""
    for user, position in tokens.uses():
        table = user.inputs[0] if user.op_type == "Gather" and position == 1 else None
        if table is not None and table.const_value is not None:
            return int(table.const_value.shape.numpy()[0])
    return None


def refuse_batch_global_ops(model: ir.Model) -> None:
    """Raises for ops whose result for one token depends on all tokens of the batch."""
    for node in model.graph:
        if node.op_type in PER_TENSOR_OPS:
            raise NotConvertible(
                "activations are quantised per tensor at run time: a sequence's result would depend on what else is "
                "in the batch",
                node.name or "",
                "convert with --requantize, which quantises them per token, or convert the float model",
                kind="dynamic-quantisation",
            )


def check_caches_are_explained(caches: CacheIndex, sites: list[AttentionSite]) -> None:
    """Raises when a cache is read by something that no recognised attention accounts for."""
    explained = {link.past for site in sites for link in (*site.key_cache, *site.value_cache)}
    for node, links in caches.by_node.items():
        for link in links:
            if link.present is None:
                raise NotConvertible(
                    f"the past '{link.past.name}' is read but no output hands it on",
                    node.name or "",
                    "export with present outputs",
                    kind="cache",
                )
            if link.past not in explained:
                raise NotConvertible(
                    f"the past '{link.past.name}' is read by something that is no recognised attention",
                    node.name or "",
                    kind="cache",
                )
