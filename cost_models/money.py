"""What training costs: device-hours, money and energy per token."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Spent:
    """Per million tokens: `price` in the currency of the device-hour's price, energy of the devices at their rated power."""

    device_hours: float
    price: float | None
    kwh: float | None


def per_million_tokens(
    tokens_per_s: float, devices: int, device_hour_price: float | None = None, power_w: float | None = None
) -> Spent:
    """What a million tokens take of a job with so many devices, idle ones included: they are paid for as well.

    Energy is that of the devices alone, at their rated power all the time: an upper bound of theirs, without hosts and cooling.
    """
    seconds = MILLION / tokens_per_s
    hours = devices * seconds / SECONDS_PER_HOUR
    return Spent(
        device_hours=hours,
        price=None if device_hour_price is None else hours * device_hour_price,
        kwh=None if power_w is None else devices * power_w * seconds / JOULES_PER_KWH,
    )
