"""Each rule finds its own kind of damage, and says nothing of a healthy engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_driver import Driver
from pagegraft.runtime.engine.cache_manager import GroupShape
from pagegraft.runtime.engine.invariants import Snapshot, snapshot, violations


def healthy() -> Snapshot:
    driver = Driver(groups=[GroupShape(None, 16), GroupShape(5, 12)], budget=8)
    driver.add([1] * 9, 4)
    driver.run()
    driver.add([2, 1, 0] * 7, 3)
    driver.add([3] * 30, 3)
    driver.add([3] * 30, 3)
    driver.step()
    driver.step()
    return snapshot(driver.scheduler)


def pool(**changes: Any) -> Callable[[Snapshot], Snapshot]:
    return lambda s: replace(
        s, pools=(replace(s.pools[0], **{k: v(s.pools[0]) for k, v in changes.items()}), s.pools[1])
    )


def first(**changes: Any) -> Callable[[Snapshot], Snapshot]:
    return lambda s: replace(
        s, running=(replace(s.running[0], **{k: v(s.running[0]) for k, v in changes.items()}), *s.running[1:])
    )


DAMAGES: list[tuple[str, Callable[[Snapshot], Snapshot]]] = [
    ("references and", pool(ref_counts=lambda p: (p.ref_counts[0] + 1, *p.ref_counts[1:]))),
    ("of the states", pool(free=lambda p: p.free[1:])),
    ("of the states", pool(free=lambda p: (*p.free, p.free[0]))),
    ("of the states", pool(free=lambda p: (*p.free, p.cached[0]))),
    ("does not exist", pool(free=lambda p: (*p.free, 99))),
    ("not those the index offers", pool(offered=lambda p: {})),
    ("the index does not offer it", pool(offered=lambda p: {b: t for b, t in p.offered.items() if b not in p.cached})),
    ("offered for other tokens", pool(offered=lambda p: {b: b"\x09" + t[1:] for b, t in p.offered.items()})),
    ("rows are lost or doubled", lambda s: replace(s, free_rows=s.free_rows[1:])),
    ("rows are lost or doubled", first(row=lambda q: q.row + 1)),
    ("out of order", lambda s: replace(s, running=s.running[::-1])),
    ("counted as waiting", lambda s: replace(s, num_waiting=s.num_waiting + 1)),
    ("which does not run", lambda s: replace(s, awaited=("gone/0",))),
    ("has computed", first(num_computed=lambda q: q.num_tokens + 1)),
    ("blocks for", first(blocks=lambda q: (q.blocks[0][:1], q.blocks[1]))),
    ("holds a block twice", first(blocks=lambda q: ((q.blocks[0][0],) * 2 + q.blocks[0][2:], q.blocks[1]))),
    ("no block in its visible range", first(blocks=lambda q: ((-1, *q.blocks[0][1:]), q.blocks[1]))),
    ("claims to have given up", first(released=lambda q: (1, q.released[1]))),
    ("more than the bound", lambda s: replace(s, max_chunk=1, pools=(s.pools[0], replace(s.pools[1], window=1)))),
    ("waits and holds", lambda s: replace(s, waiting=(replace(s.waiting[0], num_computed=1), *s.waiting[1:]))),
]


def test_a_healthy_engine_breaks_no_rule() -> None:
    state = healthy()
    assert violations(state) == []
    assert all((state.running, state.waiting, state.pools[0].cached, state.pools[0].free))


@pytest.mark.parametrize(("message", "damage"), DAMAGES)
def test_damage_is_found(message: str, damage: Callable[[Snapshot], Snapshot]) -> None:
    found = violations(damage(healthy()))
    assert any(message in text for text in found), found
