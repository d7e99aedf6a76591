"""Rows told apart by some of their columns: as keys, as an order, or as places among the distinct combinations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
ROWS_AT_ONCE = 1 << 14
"""Rows whose keys are put together at once: they stay in the cache."""
CACHED_NUMBERS = 1 << 15
"""Numbers up to which a table of who uses which stays in the cache; beyond, rows are sorted."""


def row_keys(columns: Sequence[npt.NDArray[np.generic]]) -> Ints:
    """One integer from 0 on per row, equal exactly where all columns are, and not much larger than there are rows, (n,)."""
    return _mixed_radix(columns, max(1 << 16, 4 * len(columns[0])))[0]


def sorted_rows(columns: Sequence[npt.NDArray[np.generic]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The order that sorts rows by their columns, equal ones as they lie, and where in it each distinct combination begins."""
    return _sorted(_mixed_radix(columns, _largest_key(len(columns[0])))[0])


def distinct_rows(columns: Sequence[npt.NDArray[np.generic]]) -> tuple[npt.NDArray[np.intp], Ints]:
    """First rows of the distinct combinations of some columns, in the order of these, and each row's place among them."""
    key, span = _mixed_radix(columns, _largest_key(len(columns[0])))
    if span <= CACHED_NUMBERS:
        first = np.full(span, -1, dtype=np.intp)
        first[key[::-1]] = np.arange(len(key) - 1, -1, -1)
        used = np.flatnonzero(first >= 0)
        return first[used], _ranks(used, span).take(key)
    order, begin = _sorted(key)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.repeat(np.arange(len(begin)), np.diff(begin, append=len(order)))
    return order[begin], place


def varying(rows: Ints) -> list[Ints]:
    """Those columns of rows (n, k) that are not alike in all, by which alone the rows are told apart."""
    return list(rows[:, (rows != rows[:1]).any(axis=0)].T)


def _largest_key(rows: int) -> int:
    """The span of keys that leaves room for a row's place in the bits of one number."""
    return 1 << (63 - rows.bit_length())


def _sorted(key: Ints) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The order that sorts keys, equal ones as they lie, and where in it each begins; the keys are overwritten.

    A key and its place are sorted as one number: numpy does that several times faster than it finds an order.
    """
    bits = len(key).bit_length()
    key <<= bits
    key |= np.arange(len(key))
    key.sort()
    order = key & ((1 << bits) - 1)
    key >>= bits
    begins = np.ones(len(key), dtype=bool)
    np.not_equal(key[1:], key[:-1], out=begins[1:])
    return order, np.flatnonzero(begins)


def _mixed_radix(columns: Sequence[npt.NDArray[np.generic]], largest: int) -> tuple[Ints, int]:
    """A number from 0 on per row that sorts rows by their columns, (n,), and a bound that none reaches.

    They are numbered anew whenever that would exceed `largest`.
    """
    key, span = np.zeros(len(columns[0]), dtype=np.int64), 1
    digits: list[tuple[Ints, int, int]] = []
    for column in columns if len(key) else ():
        digit = _whole(np.asarray(column))
        low, radix = _span(digit)
        if radix == 1:
            continue
        if span * radix > largest:  # a column has few values, so that its table is the smaller one
            digit, radix = _dense(digit)
            low = 0
        if span * radix > largest:
            key, span = _dense(_appended(key, digits))
            digits = []
        digits.append((digit, low, radix))
        span *= radix
    return _appended(key, digits), span


def _appended(key: Ints, digits: Sequence[tuple[Ints, int, int]]) -> Ints:
    """Numbers with some digits after them, each with its least value and its radix; the numbers are overwritten.

    On the way both numbers and least values may pass what an integer holds: they wrap round alike, and their difference is right.
    """
    lows = 0
    for _, low, radix in digits:
        lows = lows * radix + low
    lows = (lows + (1 << 63)) % (1 << 64) - (1 << 63)
    for begin in range(0, len(key), ROWS_AT_ONCE):
        some = key[begin : begin + ROWS_AT_ONCE]
        for digit, _, radix in digits:
            some *= radix
            some += digit[begin : begin + ROWS_AT_ONCE]
        some -= lows
    return key


def _whole(column: npt.NDArray[np.generic]) -> Ints:
    """A column as integers that are equal where its values are."""
    if column.dtype.kind != "f":
        return column.astype(np.int64, copy=False)
    whole = column.astype(np.int64)
    return whole if (whole == column).all() else np.unique(column, return_inverse=True)[1].reshape(-1)


def _span(numbers: Ints) -> tuple[int, int]:
    """The least of some numbers, and how far they reach from it, both ends counted."""
    some = [numbers[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(numbers), ROWS_AT_ONCE)]
    ends = [(int(each.min()), int(each.max())) for each in some]
    low = min(low for low, _ in ends)
    return low, max(high for _, high in ends) - low + 1


def _dense(numbers: Ints) -> tuple[Ints, int]:
    """The same numbers, each in place of its rank among those that occur, and how many these are."""
    if not len(numbers):
        return numbers, 1
    low, span = _span(numbers)
    if span > 4 * len(numbers) + 64:
        values, place = np.unique(numbers, return_inverse=True)
        return place.reshape(-1), len(values)
    offset = numbers - low
    used = np.zeros(span, dtype=bool)
    used[offset] = True
    values = np.flatnonzero(used)
    return _ranks(values, span).take(offset), len(values)


def _ranks(values: npt.NDArray[np.intp], span: int) -> Ints:
    """By number below `span` its place among rising `values`, where it is one."""
    rank = np.empty(span, dtype=np.int64)
    rank[values] = np.arange(len(values))
    return rank
