"""What was measured of exchanges of tokens beyond the curves of their kernels (exchanges.yaml)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..search_spaces.cluster import Sourced
from ..search_spaces.documents import read_document, to_record
from ..search_spaces.model import Frozen


class Exchanges(Frozen):
    """Sourceds of the kernels that exchange tokens between the devices of experts."""

    measured_supernodes: Sourced  # between which exchanges were measured to hold the rate that is priced
    congested: Sourced  # times as long as priced that they took under an oversubscribed spine
    sharpness: Sourced  # order of the norm of the links' time and the copies', which a kernel takes


@cache
def exchanges() -> Exchanges:
    """The file."""
    path = Path(__file__).parent / "exchanges.yaml"
    return to_record(Exchanges, read_document(path), path.name)
