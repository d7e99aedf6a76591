"""Points planned on a Ray cluster: a task each, on whatever cores the cluster has. Ray is imported here alone.

The cluster's machines need paraplan installed and see the sweep's files under the same paths; results come back to the process that
asked, which writes them to the store.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...search_spaces.errors import InputError
from .grid import Point

if TYPE_CHECKING:
    from .point import Outcome

LOCAL = "local"
"""The address that starts Ray on this machine."""
ANSWERS_WITHIN_S = 5.0
"""Seconds in which the head of a cluster takes a connection; Ray itself tries for minutes."""


class Ray:
    """A pool of Ray tasks."""

    def __init__(self, address: str, workers: int | None = None) -> None:
        """Joins the cluster at an address, "auto" for the one this machine belongs to; `workers` are the cores of a local one."""
        try:
            import ray
        except ImportError as error:
            raise InputError("--ray: Ray is not installed; pip install 'paraplan[ray]', or leave the option out") from error
        self._ray: Any = ray
        local = address == LOCAL
        more: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if local else {}
        try:
            _reach(address)
            self._ray.init(address="local" if local else address, log_to_driver=False, logging_level="ERROR", **more)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(f"--ray {address}: no cluster answers there ({reason}); start one, or write --ray {LOCAL}") from error
        self._task: Any = ray.remote(max_retries=0)(_solve)
        self._keys: dict[Any, str] = {}

    @property
    def slots(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, key: str, point: Point, folder: Path) -> None:
        self._keys[self._task.remote(point.to_json(), str(folder))] = key

    def wait(self, seconds: float) -> list[tuple[str, Outcome | None]]:
        if not self._keys:
            return []
        first, rest = self._ray.wait(list(self._keys), timeout=seconds)
        more = self._ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest and first else []
        return [(self._keys.pop(done), self._outcome(done)) for done in (*first, *more)]

    def close(self) -> None:
        for task in self._keys:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()

    def _outcome(self, task: Any) -> Outcome | None:
        try:
            outcome: Outcome = self._ray.get(task)
        except self._ray.exceptions.RayError:  # its worker, or the machine, was lost
            return None
        return outcome


def _reach(address: str) -> None:
    """OSError where an address names a host and a port, as in ray://head:10001, and nobody answers there."""
    if found := re.fullmatch(r"(?:\w+://)?\[?(.+?)\]?:(\d{1,5})/?", address):
        socket.create_connection((found[1], int(found[2])), ANSWERS_WITHIN_S).close()


def _solve(asked: str, folder: str) -> Outcome:
    from .point import solve

    return solve(Point.from_json(asked), Path(folder))
