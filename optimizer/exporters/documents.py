"""Settings as the nested mapping of a JSON or YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .knobs import Settings


def nested(settings: Settings, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Dotted names as mappings within mappings, over those of `base`; of two settings of a key the later one counts."""
    found: dict[str, Any] = {key: _copied(value) for key, value in (base or {}).items()}
    for setting in settings:
        *path, key = setting.name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[key] = setting.value
    return found


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
