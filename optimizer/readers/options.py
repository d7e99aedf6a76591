"""Options by the knob they set: the exporters' table of flags, read backwards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from ...search_spaces.errors import InputError
from .dialects import knobs_of
from .job import MOST, Finding
from .shell import Option, shown, unresolved, without_value


@dataclass
class Knobs:
    """What a command line sets, by knob. `where` names it in errors; `used` options are understood, the rest is `unknown`.

    `empty` are words of the command line that may stand for options but hold no value.
    """

    where: str
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    told: list[Finding] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    parsed: bool = True  # by Megatron's own parser, which refuses some options without others

    def add(self, knob: str, name: str, values: tuple[str, ...]) -> None:
        """Sets a knob; one that the file gives twice keeps the later value, as argparse does, and it is told if they differ."""
        before = self.values.get(knob)
        if before is not None and before != values:
            old, new = (" ".join(map(shown, each)) or "on" for each in (before, values))
            self.told.append(
                Finding("option", f"{name} is given twice, {old} and then {new}: the framework takes the last, {new}.")
            )
        self.values[knob], self.names[knob] = values, name

    @property
    def holds_more(self) -> bool:
        """Whether the command line may have options that the file does not hold; a script's own arguments are taken to be none."""
        return any(name not in ("@", "*") for word in self.empty for name in unresolved(word))

    def has(self, knob: str) -> bool:
        return knob in self.values

    def text(self, knob: str) -> str | None:
        """The value of a knob; None where it is not given or has no value in the file."""
        values = self.values.get(knob)
        if not values:
            return None
        missing = [name for value in values for name in unresolved(value)]
        if missing:
            said = without_value(f"{self.names[knob]} {' '.join(values)}")
            if said not in self.unresolved:
                self.unresolved.append(said)
            return None
        return " ".join(values)

    def whole(self, knob: str, least: int = 1) -> int | None:
        """The whole number of a knob. InputError, naming option and value, for what is none."""
        text = self.text(knob)
        return None if text is None else whole(text, f"{self.where}: {self.names.get(knob, knob)}", least)


SHAPING = re.compile(
    r"^(?!-*(?:reset|recompute|sglang|vllm|rollout)).*"  # what becomes of values, and what generates beside the trainer
    r"(?:expert|layer|hidden|head|rank|dim|vocab|moe|mla|mtp|ffn|attention|attn|shared|window|norm|bias|[gr]elu|glu"
    r"|activation.func|clamp|softcap|sink)",
    re.IGNORECASE,
)


def may_shape_the_model(option: str) -> bool:
    """Whether an option that is not known may change what is computed, by the words in its name."""
    return bool(SHAPING.search(re.split(r"[ =]", option, maxsplit=1)[0]))


def whole(text: object, what: str, least: int = 1) -> int:
    """A whole number within reason. InputError names what it was and what would be right."""
    plain = str(text).strip()
    digits = plain[1:] if plain[:1] in "+-" else plain
    if plain.startswith("$"):
        raise InputError(f"{what} {_short(plain)} has no value in the file; give it, as with --set {plain.strip('${}')}=8")
    if isinstance(text, bool) or not (digits.isascii() and digits.isdigit()):
        raise InputError(f"{what} {_short(plain)!r} is not a whole number")
    if len(digits) > 12 or not least <= int(plain) <= MOST:
        raise InputError(f"{what} {_short(plain)} must be a whole number from {least} to {MOST:,}")
    return int(plain)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"


def by_knob(options: Iterable[Option], framework: str, more: Mapping[str, str], plain: frozenset[str], where: str) -> Knobs:
    """Options sorted by what they set. `more` names knobs beyond the exporters' table, `plain` options that no layout hangs on."""
    table = knobs_of(framework)
    knobs = Knobs(where)
    for option in options:
        name = option.name
        hyphens = name.replace("_", "-")
        if name in table:
            knob, renamed = table[name]
            knobs.add(knob, f"--{name}", tuple(renamed.get(value, value) for value in option.values))
        elif name in more:
            knobs.add(more[name], f"--{name}", option.values)
        elif hyphens not in plain:
            knobs.unknown.append(str(option))
    names = {*table, *more} - {name.removeprefix("--") for name in knobs.names.values()}
    knobs.unknown = [f"{each}{misspelt(each.split()[0].removeprefix('--'), names, '--')}" for each in knobs.unknown]
    return knobs


NEAR = 0.9
"""Ratio of letters in common from which a name is taken for another one, misspelt."""


def misspelt(name: str, known: Collection[str], dashes: str = "", least: float = NEAR) -> str:
    """ " (did you mean x?)", where an unknown name is nearly one that is known."""
    near = get_close_matches(name, known, 1, least) if name.strip() not in known else []
    return f" (did you mean {dashes}{near[0]}?)" if near else ""
