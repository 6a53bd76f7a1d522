"""Puts an engine together from a converted model's folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..custom_ops.manifest import Manifest
from .config import EngineConfig
from .engine.block_table import BlockTables
from .engine.cache_manager import CacheManager, GroupShape
from .engine.engine import Engine, EngineParts
from .engine.errors import CacheMemoryError, ConfigurationError
from .engine.positions import largest_chunk
from .engine.request import ModelLimits
from .engine.scheduler import Scheduler
from .model.batch import FeedBuilder
from .model.kv_pool import bytes_per_block, least_memory, size_pools
from .model.memory import DEFAULT_FRACTION, available_memory, parse_bytes
from .model.runner import KVGroup, ModelRunner
from .model.session import OnnxRunner
from .sampling import GrammarCompiler
from .text import ModelText

__all__ = ["LoadedModel", "load_engine"]

#: Context of a model that states none and whose cache nothing bounds.
_UNBOUNDED_CONTEXT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """An engine and what belongs to it."""

    folder: Path
    manifest: Manifest
    engine: Engine
    text: ModelText
    block_size: int
    kv_bytes: int

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles structured outputs for this model's tokens."""
        limits = self.engine.limits
        return GrammarCompiler(limits.tokenizer, vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids)


def load_engine(path: str | Path, config: EngineConfig, *, runner: ModelRunner | None = None) -> LoadedModel:
    """Loads a converted model. `runner` replaces the onnxruntime runner.

    Raises ManifestError for a folder that is no intact converted model, ConfigurationError for settings with which it
    cannot run, ChatTemplateError for a template of the caller's that is none.
    """
    folder = Path(path)
    manifest = Manifest.load(folder)
    text = ModelText(folder, chat_template=config.chat_template)
    block_size = config.block_size or manifest.default_block_size
    if runner is None:
        runner = _runner(folder, manifest, config)
    elif config.shared_memory is not None:
        raise ConfigurationError("a runner of your own has its own memory: leave shared_memory out")
    try:
        shapes, max_chunk = _shapes(manifest, config, block_size)
        _allocate(runner, [KVGroup(shape.num_blocks, block_size) for shape in shapes], config)
        cache = CacheManager(shapes, block_size, max_chunk=max_chunk, share_prefixes=config.enable_prefix_caching)
        engine = _assemble(text, manifest, config, runner, cache)
    except BaseException:
        runner.close()  # or the caches would stay, in shared memory under their name
        raise
    sizes = bytes_per_block(manifest, block_size)
    return LoadedModel(
        folder=folder,
        manifest=manifest,
        engine=engine,
        text=text,
        block_size=block_size,
        kv_bytes=sum(size * shape.num_blocks for size, shape in zip(sizes, shapes, strict=True)),
    )


def _allocate(runner: ModelRunner, groups: list[KVGroup], config: EngineConfig) -> None:
    """Raises ConfigurationError, with the setting that was given, when the memory is not there."""
    try:
        runner.allocate_kv(groups)
    except CacheMemoryError as error:
        given = next((name for name in ("kv_memory", "num_blocks") if getattr(config, name) is not None), None)
        if given is None:
            raise
        raise CacheMemoryError(f"{given}={getattr(config, given)}: {error}") from None


def _assemble(
    text: ModelText, manifest: Manifest, config: EngineConfig, runner: ModelRunner, cache: CacheManager
) -> Engine:
    """The engine over a runner that has its caches."""
    scheduler = Scheduler(cache, max_step_tokens=config.max_num_batched_tokens, max_sequences=config.sequences)
    tables = BlockTables(len(cache.groups), config.sequences)
    parts = EngineParts(
        scheduler=scheduler,
        runner=runner,
        tables=tables,
        feeds=FeedBuilder(manifest.groups, tables, cache.block_size),
        limits=_limits(manifest, cache.groups, cache.block_size, text),
        num_speculative=config.num_speculative_tokens,
        debug=config.debug,
    )
    return Engine(parts)


def _runner(folder: Path, manifest: Manifest, config: EngineConfig) -> ModelRunner:
    if config.device == "cpu":
        return OnnxRunner(folder, manifest, num_threads=config.num_threads, shared_memory=config.shared_memory)
    from .model.torch_runner import TorchRunner  # torch is an extra

    device = "npu" if config.device == "npu" else "cpu"
    runner = TorchRunner(folder, manifest, device=device, num_threads=config.num_threads)
    if device == "npu" and config.kv_memory is None and config.num_blocks is None:
        raise ConfigurationError("the memory of an NPU is not measured here: say how much the caches get, --kv-memory")
    return runner


def _shapes(manifest: Manifest, config: EngineConfig, block_size: int) -> tuple[tuple[GroupShape, ...], int]:
    """Blocks by group, and the largest chunk that every windowed group can hold."""
    max_chunk = config.max_num_batched_tokens
    if config.num_blocks is not None:
        shapes = tuple(GroupShape(group.window, config.num_blocks) for group in manifest.groups)
        for shape in shapes:
            if shape.window is not None:
                max_chunk = min(max_chunk, largest_chunk(shape.window, shape.num_blocks, block_size))
        if max_chunk < 1:
            raise ConfigurationError(
                f"num_blocks={config.num_blocks} of {block_size} tokens are too few for a window of "
                f"{max(s.window or 0 for s in shapes)} tokens: give more, or leave num_blocks out"
            )
        return shapes, max_chunk
    if config.kv_memory is None:
        budget = int(available_memory() * DEFAULT_FRACTION)
    else:
        budget = parse_bytes(config.kv_memory)
    # A smaller chunk needs fewer blocks beside a window; the full groups are to keep half of the budget at least.
    while max_chunk > block_size and least_memory(manifest, block_size, max_chunk) > budget // 2:
        max_chunk //= 2
    shapes = size_pools(manifest, block_size, budget, max_sequences=config.sequences, max_chunk=max_chunk)
    return shapes, max_chunk


def _limits(manifest: Manifest, shapes: tuple[GroupShape, ...], block_size: int, text: ModelText) -> ModelLimits:
    # The last token of a sequence is sampled and never computed, so it needs no slot.
    bounds = [shape.num_blocks * block_size + 1 for shape in shapes if shape.window is None]
    if manifest.max_positions is not None:
        bounds.append(manifest.max_positions)
    return ModelLimits(
        vocab_size=manifest.vocab_size,
        max_context=min(bounds, default=_UNBOUNDED_CONTEXT),
        eos_token_ids=text.eos_token_ids,
        tokenizer=text.tokenizer if text.has_tokenizer else None,
    )
