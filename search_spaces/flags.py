"""What flags may say: --fix tp=8,pp=16, --forbid "pp>16", --constraint "tp*cp <= 64", --inside supernode:tp,sp,ep."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .choices import SP_WHERE
from .documents import did_you_mean, unsupported
from .errors import InputError
from .groups import DIMENSIONS
from .layout import CP_TYPES, RANK_ORDERS, SCHEDULES, Recompute, offload_text, parse_offload, parse_sharding

INTEGER_COLUMNS = ("tp", "cp", "pp", "dp", "ep", "etp", "edp", "vpp", "micro_batch", "num_microbatches")
SIGNS = "<=|>=|==|!=|<|>|="
MAX_DIGITS = 9
MOST_NESTED = 50
OPERATORS = "there is * between factors, <, <=, >, >=, == and != between products, and and, or, not between comparisons"

Values = str | int | bool | Sequence[str | int | bool]


def parse_fix(given: str | Mapping[str, Values], flag: str = "fix") -> dict[str, tuple[str, ...]]:
    """Columns and the values they may take: "tp=4|8,pp=16,recompute=none|full", or the same as a mapping.

    Values come back as text in their normal form ("selective" as "selective:core_attn"). InputError names flag, column and value.
    """
    pairs = _pairs(given, flag) if isinstance(given, str) else [(name, _as_list(value)) for name, value in given.items()]
    fixed: dict[str, tuple[str, ...]] = {}
    for name, values in pairs:
        column = column_named(name, flag, COLUMN_VALUES)
        if column in fixed:
            both = "|".join((*fixed[column], *values))
            raise InputError(f"{flag}: {column} is given twice; write {column}={both} to allow several values")
        if not values:
            raise InputError(f"{flag}: {column} has no value; write {column}=VALUE")
        fixed[column] = tuple(dict.fromkeys(_normal(column, value, flag) for value in values))
    if len(fixed.get("sequence_parallel", ())) > 1:
        raise InputError(f"{flag}: sequence_parallel takes one value; without any it is on {SP_WHERE}, fixed to false nowhere")
    return fixed


@dataclass(frozen=True)
class Comparison:
    """`left op right`: products of integer columns and whole numbers, or a text column (== and != only) and its value.

    A product is a tuple of its factors; a text comparison has the column alone on the left and the value alone on the right.
    """

    left: tuple[str | int, ...]
    op: str
    right: tuple[str | int, ...]

    @classmethod
    def of(cls, left: str, sign: str, right: str, text: str, flag: str) -> Comparison:
        """Two sides and the sign between them, as they stand in `text`."""
        op = "==" if sign == "=" else sign
        if left.replace("-", "_") in TEXT_COLUMNS:
            column = left.replace("-", "_")
            if op not in ("==", "!="):
                raise InputError(f"{flag}: {text!r} orders {column}, which is text; use == or !=")
            return cls((column,), op, (_normal(column, right, flag),))
        return cls(_product(left, text, flag), op, _product(right, text, flag))

    @property
    def negated(self) -> Comparison:
        opposite = {"<=": ">", ">": "<=", ">=": "<", "<": ">=", "==": "!=", "!=": "=="}
        return Comparison(self.left, opposite[self.op], self.right)

    def __str__(self) -> str:
        return f"{'*'.join(map(str, self.left))}{self.op}{'*'.join(map(str, self.right))}"


@dataclass(frozen=True)
class Joined:
    """Clauses joined by "and" or "or"."""

    word: str
    parts: tuple[Clause, ...]

    @property
    def negated(self) -> Joined:
        return Joined("or" if self.word == "and" else "and", tuple(part.negated for part in self.parts))

    def __str__(self) -> str:
        return f" {self.word} ".join(f"({part})" if isinstance(part, Joined) else str(part) for part in self.parts)


Clause = Comparison | Joined


def parse_clause(text: str, flag: str = "forbid") -> Clause:
    """Reads comparisons joined by "and", "or" and "not", with brackets: "pp == 8 or (vpp == 1 and tp*cp <= 64)".

    "and" binds tighter than "or". InputError says what would be right; nothing is ever evaluated.
    """
    words = [word.strip() for word in re.split(r"(\(|\)|\band\b|\bor\b|\bnot\b)", text) if word.strip()]
    if words.count("(") + words.count("not") > MOST_NESTED:
        raise InputError(f"{flag}: a rule may have {MOST_NESTED} brackets and negations; split it into several")
    clause, rest = _either(words, text, flag)
    if rest:
        raise InputError(f"{flag}: {rest[0]!r} in {text!r} follows nothing that it could belong to")
    return clause


def parse_forbid(given: str | Iterable[str]) -> tuple[str, ...]:
    """Clauses that no layout may satisfy, in normal form: "pp > 16, tp*cp>64 and vpp>1" as ("pp>16", "tp*cp>64 and vpp>1")."""
    return tuple(dict.fromkeys(str(parse_clause(text)) for text in _split(given, "forbid")))


def parse_constraint(given: str | Iterable[str]) -> tuple[str, ...]:
    """Clauses that every layout must satisfy, as what they forbid: "tp*cp <= 64" as ("tp*cp>64",)."""
    return tuple(dict.fromkeys(str(parse_clause(text, "constraint").negated) for text in _split(given, "constraint")))


WHERE_THEY_FIT = ("tp", "cp", "ep", "etp")
"""Dimensions whose groups begin a unit of their own whatever the rank order, so that whether they fit depends on their size."""


def parse_inside(given: str | Iterable[str] | Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Levels and the dimensions whose groups must stay within one of their units: "supernode:tp,sp,ep;server:tp".

    SP runs over the TP group, so "sp" comes back as "tp"; "ep?" asks only for groups that fit into a unit. InputError names a
    dimension that is none; whether the level exists is the cluster's to say.
    """
    inside: dict[str, tuple[str, ...]] = {}
    for level, names in _inside_pairs(given):
        dimensions = []
        for name in names:
            bare = name.removesuffix("?")
            dimension = "tp" if bare == "sp" else bare
            if dimension not in DIMENSIONS:
                raise InputError(f"inside: {name!r} is not a dimension: {', '.join(DIMENSIONS)} or sp")
            if bare != name and dimension not in WHERE_THEY_FIT:
                raise InputError(f"inside: {name!r}: only {', '.join(WHERE_THEY_FIT)} can be kept inside where they fit")
            dimensions.append(dimension + name[len(bare) :])
        inside[level] = tuple(dict.fromkeys((*inside.get(level, ()), *dimensions)))
    return inside


def refuse_unsupported(names: Iterable[str], where: str) -> None:
    """InputError if a key asks for adapters, packed sequences or frozen parameters, which are not priced."""
    for name in names:
        refusal = unsupported(name)
        if refusal:
            raise InputError(f"{where}: {name} asks for {refusal}, which paraplan does not price; leave it out")


def _either(words: list[str], text: str, flag: str) -> tuple[Clause, list[str]]:
    """The clause at the front of some words, and the words after it."""
    return _chain("or", lambda left: _chain("and", lambda inner: _unit(inner, text, flag), left), words)


def _chain(word: str, read: Callable[[list[str]], tuple[Clause, list[str]]], words: list[str]) -> tuple[Clause, list[str]]:
    part, words = read(words)
    parts = [part]
    while words[:1] == [word]:
        part, words = read(words[1:])
        parts.append(part)
    return (parts[0] if len(parts) == 1 else Joined(word, tuple(parts))), words


def _unit(words: list[str], text: str, flag: str) -> tuple[Clause, list[str]]:
    if words[:1] == ["not"]:
        clause, rest = _unit(words[1:], text, flag)
        return clause.negated, rest
    if words[:1] == ["("]:
        clause, rest = _either(words[1:], text, flag)
        if rest[:1] != [")"]:
            raise InputError(f"{flag}: {text!r} has a bracket that is not closed")
        return clause, rest[1:]
    return _compared(words[0] if words and words[0] not in (")", "and", "or") else text, flag), words[1:]


def _compared(text: str, flag: str) -> Clause:
    """One comparison, or a chain such as "2 <= tp <= 4": its neighbours compared pair by pair."""
    plain = text.strip()
    for fancy, ascii_form in (("≤", "<="), ("≥", ">="), ("≠", "!="), ("×", "*"), ("·", "*")):
        plain = plain.replace(fancy, ascii_form)
    sides, signs = [side.strip() for side in re.split(SIGNS, plain)], re.findall(SIGNS, plain)
    if not signs or not all(sides):
        raise InputError(f'{flag}: {text!r} is not a comparison such as "pp>16" or "tp*cp<=64"')
    pairs = zip(sides, signs, sides[1:], strict=False)
    found = tuple(Comparison.of(left, sign, right, text, flag) for left, sign, right in pairs)
    return found[0] if len(found) == 1 else Joined("and", found)


def _pairs(text: str, flag: str) -> list[tuple[str, list[str]]]:
    pairs = []
    for part in _split(text, flag):
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{flag}: {part!r} is not COLUMN=VALUE, such as tp=8 or tp=4|8")
        values = [item.strip() for item in value.split("|")]
        if len(values) > 1 and not all(values):
            raise InputError(f"{flag}: {part!r} has nothing on one side of a |; write a value there, or leave the | out")
        pairs.append((name, values if values[0] else []))
    return pairs


def _as_list(value: Values) -> list[str]:
    values = [value] if isinstance(value, str | int) else value
    return [str(item).lower() if isinstance(item, bool) else str(item) for item in values]


def _split(given: str | Iterable[str], flag: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    return [part for text in texts for part in items(text, flag)]


def _inside_pairs(given: str | Iterable[str] | Mapping[str, Sequence[str]]) -> list[tuple[str, list[str]]]:
    if isinstance(given, Mapping):
        return [(level, [name.strip() for name in names]) for level, names in given.items()]
    texts = [given] if isinstance(given, str) else given
    pairs = []
    for part in (part.strip() for text in texts for part in text.split(";") if part.strip()):
        level, colon, dimensions = part.partition(":")
        names = [name.strip() for name in dimensions.split(",") if name.strip()]
        if not colon or not level.strip() or not names:
            raise InputError(f"inside: {part!r} is not LEVEL:dimension,dimension, such as supernode:tp,ep")
        pairs.append((level.strip(), names))
    return pairs


def items(text: str, flag: str) -> list[str]:
    """The parts of a list between commas. InputError names the place of one that is empty."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and "" in parts:
        raise InputError(f"{flag}: item {parts.index('') + 1} of {text!r} is empty; a comma stands between two items")
    return parts if parts != [""] else []


def column_named(name: str, flag: str, known: Iterable[str]) -> str:
    """The column of a name, or of one that reports and tables of runs have for it (`SHORT`). InputError says which column is meant
    by one that frameworks or people use instead.
    """
    column = name.strip().lower().lstrip("-").replace("-", "_")
    column = SHORT.get(column, column)
    columns = list(known)
    if column in columns:
        return column
    refuse_unsupported([column], flag)
    stem = SUFFIX.sub("", column)
    usual = OTHER_NAMES.get(column) or OTHER_NAMES.get(stem, stem)
    if usual.startswith("--"):
        raise InputError(f"{flag}: {name.strip()!r} is not a column; it is given with {usual}")
    near = f"; did you mean {usual!r}?" if usual in columns else did_you_mean(column, columns)
    raise InputError(f"{flag}: {name.strip()!r} is not a column{near or ': ' + ', '.join(columns)}")


SHORT = {"mb": "micro_batch", "sp": "sequence_parallel", "pp_schedule": "schedule"}
"""What reports and tables of measured runs call a column."""
SUFFIX = re.compile(r"(?:_model)?(?:_parallel(?:ism)?)?(?:_(?:size|degree|world_size|num))?$")
"""What frameworks put behind the name of a dimension."""
OTHER_NAMES = {
    other: column
    for column, others in {
        "tp": "tensor model mp",
        "cp": "context ring",
        "pp": "pipeline pipe pipeline_stage num_stages",
        "dp": "data dp_replicate dp_shard data_parallel_replicate data_parallel_shard",
        "ep": "expert experts",
        "etp": "expert_tensor",
        "edp": "expert_data",
        "vpp": "vp virtual_pipeline interleave pp_interleave_num num_virtual_stages_per_pipeline_rank "
        "num_layers_per_virtual_pipeline_stage chunks",
        "micro_batch": "mbs micro_batch microbatch train_micro_batch_size_per_gpu local_batch batch",
        "num_microbatches": "m num_micro_batches gas ga micro_batch_num gradient_accumulation_steps grad_accum",
        "sequence_parallel": "seq_parallel use_seq_parallel sequence seq",
        "cp_type": "cp_comm_type context_parallel_algo rotate_method",
        "schedule": "pipeline_parallel_schedule schedules_method",
        "optimizer_sharding": "zero zero_stage sharding fsdp use_distributed_optimizer dist_opt zero1 zero2 zero3",
        "recompute": "ac activation_checkpoint activation_checkpointing recompute_granularity gradient_checkpointing ckpt",
        "offload": "cpu_offload optimizer_cpu_offload optimizer_offload swap_optimizer",
        "rank_order": "order use_tp_pp_dp_mapping",
        "--devices": "world gpus npus devices nproc",
        "--global-batch": "gbs global_batch train_batch",
        "--seq-len": "seq_len seq_length sequence_length max_seq_len",
    }.items()
    for other in others.split()
}
"""What frameworks and people call a column; of a name with a suffix, the part before it."""


def _product(text: str, whole: str, flag: str) -> tuple[str | int, ...]:
    factors: list[str | int] = []
    for factor in (factor.strip() for factor in text.split("*")):
        if factor.isascii() and factor.isdigit() and len(factor) <= MAX_DIGITS:
            factors.append(int(factor))
        elif re.fullmatch(r"[A-Za-z][A-Za-z_-]*", factor):
            column = column_named(factor, f"{flag} {whole!r}", COLUMN_VALUES)
            if column in TEXT_COLUMNS:
                raise InputError(f"{flag}: {column} in {whole!r} is text; it stands alone on the left of == or !=")
            factors.append(column)
        elif factor.isascii() and factor.isdigit():
            raise InputError(f"{flag}: {factor[:20]} in {whole[:60]!r} is too large a number; at most {MAX_DIGITS} digits are read")
        elif not factor or re.search(r"[^\w\s.-]|\s-|-\d", factor):
            raise InputError(f"{flag}: {text.strip()!r} in {whole!r} is no product of columns and whole numbers; {OPERATORS}")
        else:
            raise InputError(f"{flag}: {factor!r} in {whole!r} is neither a column nor a whole number")
    return tuple(factors)


def _normal(column: str, value: str, flag: str = "fix") -> str:
    try:
        return COLUMN_VALUES[column](value.strip())
    except ValueError as error:
        reason = str(error)
        raise InputError(f"{flag}: {reason if reason.startswith(column) else f'{column} = {value!r} {reason}'}") from error


def _whole(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and int(text) > 0):
        raise ValueError(f"must be a whole number of at least 1 and at most {MAX_DIGITS} digits")
    return str(int(text))


def _word(*words: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text

    return check


def _order(text: str) -> str:
    if text not in RANK_ORDERS:
        raise ValueError(f"must name tp, cp, ep, dp and pp once each, such as {RANK_ORDERS[0]}")
    return text


def _flag(text: str) -> str:
    """ "true" or "false", of these, on and off, or 1 and 0."""
    word = {"on": "true", "off": "false", "1": "true", "0": "false"}.get(text.lower(), text.lower())
    if word not in ("true", "false"):
        raise ValueError("must be true or false, on or off")
    return word


def _sharding(text: str) -> str:
    parse_sharding(text)
    return text


TEXT_COLUMNS: dict[str, Callable[[str], str]] = {
    "sequence_parallel": _flag,
    "cp_type": _word(*CP_TYPES),
    "schedule": _word(*SCHEDULES),
    "optimizer_sharding": _sharding,
    "recompute": lambda text: str(Recompute.parse(text)),
    "offload": lambda text: offload_text(*parse_offload(text)),
    "rank_order": _order,
}
COLUMN_VALUES = dict.fromkeys(INTEGER_COLUMNS, _whole) | TEXT_COLUMNS
"""Every column that can be fixed, and how a value of it is brought to its normal form (ValueError: what it must be)."""
