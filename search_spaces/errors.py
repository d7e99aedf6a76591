"""The two ways a question can end without a plan: the input is wrong, or nothing legal answers it."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input, in one sentence that names file, field, value and remedy. The command ends with status 2."""


class Infeasible(ValueError):  # noqa: N818
    """No legal layout, or an illegal one was asked about; `reasons` are sentences. The command ends with status 1."""

    def __init__(self, summary: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(summary)
        self.summary = summary
        self.reasons = reasons
