"""What a judgement of a job says."""

from __future__ import annotations

from ...search_spaces.layout import Problem
from ..result import Certificate, PricedLayout, Result
from ..waterfall import Waterfall
from .legality import Broken
from .tolerance import Tolerance


class Mended(Result):
    """A change after which the job fits, as pairs of its own format's words, with its peak and how much slower the step becomes."""

    changes: tuple[tuple[str, str], ...]
    peak_gib: float
    step_time_s: float
    slower: float
    verdict: str


class Fit(Result):
    """Whether the fullest stage holds its peak: the term that takes most of it, what is over, and what would mend it."""

    verdict: str
    stage: int
    peak_gib: float
    free_gib: float
    over_gib: float
    term: str
    term_gib: float
    mends: tuple[Mended, ...] = ()


AND = "; "
"""Between the options of one change."""


class Change(Result):
    """One decision on the way to the best layout, in the format's own words, and what it adds to the step and the fullest stage.

    `column` names several, with commas, where their shares say nothing apart.
    """

    column: str
    before: str
    after: str
    seconds: float | None = None
    peak_gib: float | None = None


class Checked(Result):
    """The judgement of a job. `legal` is None where nothing could be judged, `fit` and `priced` where it has no price.

    `ok`: nothing that could be judged is broken, and what was priced fits.
    """

    paraplan: str
    format: str
    framework: str | None = None
    stack: str | None = None
    model: str | None = None
    cluster: str | None = None
    accelerator: str | None = None
    devices: int | None = None
    idle: int = 0  # of them, in a plan that does not use all
    global_batch: int | None = None
    seq_len: int | None = None
    problem: Problem | None = None
    given: dict[str, int | str]
    stages: tuple[int, ...] = ()
    mtp: tuple[int, ...] = ()  # of the layers of each chunk
    ok: bool
    legal: bool | None
    broken: tuple[Broken, ...] = ()
    nearest: tuple[tuple[str, ...], ...] = ()
    nearest_columns: tuple[dict[str, int | str], ...] = ()
    advice: tuple[str, ...] = ()
    judged: int = 0
    not_judged: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # what makes the model another than it likely is
    unmodelled: tuple[str, ...] = ()  # what the job trains in another way than is priced
    unpriced: tuple[str, ...] = ()
    fit: Fit | None = None
    priced: PricedLayout | None = None
    nearest_priced: PricedLayout | None = None  # the nearest legal layout, of a job that has no price; changes start from it
    best: PricedLayout | None = None
    best_status: str = ""
    certificate: Certificate | None = None
    faster: float | None = None
    waterfall: Waterfall | None = None
    changes: tuple[Change, ...] = ()
    fault_tolerance: Tolerance | None = None
    assumptions: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    may_change_model: tuple[str, ...] = ()  # of what is not known, what may change the model
    unresolved: tuple[str, ...] = ()
