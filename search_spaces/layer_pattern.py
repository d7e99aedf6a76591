"""The notation for a sequence of layer kinds: "kind", "N*kind" and "N*(kind kind …)", whose inner items may again repeat a kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MAX_LAYERS = 10_000
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SIMPLE = re.compile(rf"(?:([0-9]{{1,6}})\*)?({NAME.pattern})")
_SEQUENCE = re.compile(r"([0-9]{1,6})\*\(([^()]*)\)")


def expand(items: Iterable[str]) -> tuple[str, ...]:
    """The kind of every layer in order. ValueError names the item that is not in the notation, or says that it is too long."""
    kinds: list[str] = []
    for item in items:
        kinds += _expand_item(item.strip())
        if len(kinds) > MAX_LAYERS:
            raise ValueError(f"layers item {item!r} makes the model longer than {MAX_LAYERS} layers; lower its repeat count")
    return tuple(kinds)


def compact(kinds: Sequence[str], longest_period: int = 16) -> tuple[str, ...]:
    """The same sequence in the notation: at each position the repeat that covers most layers, the shortest period on a tie."""
    items, position = [], 0
    while position < len(kinds):
        period, repeats = max(
            ((p, _repeats(kinds, position, p)) for p in range(1, longest_period + 1)),
            key=lambda found: (found[0] * found[1] if found[1] > 1 else 1, -found[0]),
        )
        length = period if repeats > 1 else 1
        items.append(_item(kinds[position : position + length], repeats))
        position += length * repeats
    return tuple(items)


def _expand_item(item: str) -> list[str]:
    if sequence := _SEQUENCE.fullmatch(item):
        return _repeat(item, sequence[1], [kind for part in sequence[2].split() for kind in _expand_simple(part, item)])
    return _expand_simple(item, item)


def _expand_simple(part: str, item: str) -> list[str]:
    match = _SIMPLE.fullmatch(part)
    if match is None:
        raise ValueError(f'layers item {item!r} is not "kind", "N*kind" or "N*(kind kind …)"; write it so')
    return _repeat(item, match[1] or "1", [match[2]])


def _repeat(item: str, times: str, kinds: list[str]) -> list[str]:
    if int(times) * len(kinds) == 0:
        raise ValueError(f"layers item {item!r} stands for no layer; remove it or repeat it at least once")
    if int(times) * len(kinds) > MAX_LAYERS:
        raise ValueError(f"layers item {item!r} makes the model longer than {MAX_LAYERS} layers; lower its repeat count")
    return kinds * int(times)


def _repeats(kinds: Sequence[str], start: int, period: int) -> int:
    """How often in a row the `period` kinds at `start` occur; 1 if they occur once or are cut off by the end."""
    first = kinds[start : start + period]
    times = 1
    while kinds[start + times * period : start + (times + 1) * period] == first:
        times += 1
    return times


def _item(kinds: Sequence[str], repeats: int) -> str:
    if len(kinds) == 1:
        return kinds[0] if repeats == 1 else f"{repeats}*{kinds[0]}"
    return f"{repeats}*({' '.join(compact(kinds, longest_period=1))})"
