"""On how many supernodes the choices of a token fall, from the mean numbers of choices and of pairs of them in each.

Those means do not settle it. `visited_between` is the least and the most that tokens with them could have; `visited` takes nothing
else to be known: of all ways to deal a token's choices to supernodes that have the means, the one of greatest entropy.
"""

from __future__ import annotations

from math import lgamma

import numpy as np

from ..search_spaces.layout import Floats

SWEEPS = 40
"""Times at most that the odds of every supernode are fitted anew, which takes 5 to 20 of them."""
CLOSE = 1e-5
"""Difference from the means, in choices of a token, at which they are met."""
INSIDE = 1e-4
"""Share of what pairs could be at all that they stay away from its ends: there odds would be without end."""
STEPS, HALVINGS = 3, 20


def visited_between(choices: Floats, pairs: Floats, top_k: int) -> tuple[Floats, Floats]:
    """Chance that a token has a choice in a supernode, (S,), at least and at most, given the means of one.

    Both are sharp: Dawson and Sankoff (1967) from below, with all choices but two numbers of them next to each other, and Kwerel
    (1975) from above, with one of them or all.
    """
    pairs = np.clip(pairs, *_possible(choices, top_k))
    i = 1.0 + np.floor(2.0 * pairs / np.maximum(choices, 1e-300))
    least = 2.0 * choices / (i + 1.0) - 2.0 * pairs / (i * (i + 1.0))
    return np.clip(least, 0.0, 1.0), np.clip(choices - 2.0 * pairs / top_k, 0.0, 1.0)


def visited(choices: Floats, pairs: Floats, top_k: int) -> Floats:
    """The same, (S,), of greatest entropy among all ways to deal `top_k` choices that have the means `choices` and `pairs`, (S,).

    A token that has x_s choices in supernode s is then met in proportion to Π exp(a_s·x_s + b_s·x_s·(x_s−1)/2)/x_s!; what the
    other supernodes may have is a product of polynomials, so that a and b are fitted for one supernode after the other.
    """
    counts = np.arange(top_k + 1.0)
    terms = np.stack([counts, counts * (counts - 1.0) / 2.0])
    orders = np.array([lgamma(count + 1.0) for count in counts])
    fewest, most_pairs = _possible(choices, top_k)
    away = INSIDE * (most_pairs - fewest)
    means = np.stack([choices, np.clip(pairs, fewest + away, most_pairs - away)], axis=1)
    odds = np.stack([np.log(np.maximum(choices, 1e-300) / top_k), np.zeros_like(choices)], axis=1)
    some, found = np.flatnonzero(choices > CLOSE), np.zeros(len(choices))
    none = (counts == 0).astype(np.float64)
    for _ in range(SWEEPS):
        after = [none]
        for s in some[:0:-1]:
            after.append(_times(after[-1], odds[s] @ terms - orders))
        before, missed = none, 0.0
        for s in some:
            others = np.log(np.maximum(np.convolve(before, after.pop())[: top_k + 1][::-1], 1e-300)) - orders
            chance = _chance(others + odds[s] @ terms)
            found[s], missed = 1.0 - chance[0], max(missed, float(np.abs(terms @ chance - means[s]).max()))
            odds[s] = _fitted(others, odds[s], means[s], terms)
            before = _times(before, odds[s] @ terms - orders)
        if missed < CLOSE:
            break
    least, most = visited_between(choices, pairs, top_k)
    return np.clip(found, least, most)


def _possible(choices: Floats, top_k: int) -> tuple[Floats, Floats]:
    """Fewest and most pairs, (S,), that whole numbers of choices with the mean `choices` can have."""
    whole = np.floor(choices)
    return whole * (whole - 1.0) / 2.0 + (choices - whole) * whole, choices * (top_k - 1.0) / 2.0


def _times(polynomial: Floats, logarithms: Floats) -> Floats:
    """The product with another polynomial, up to as many choices, and up to a factor that no chance depends on."""
    product = np.convolve(polynomial, np.exp(logarithms - logarithms.max()))[: len(polynomial)]
    return np.asarray(product / product.max())


def _chance(logarithms: Floats) -> Floats:
    chance = np.exp(logarithms - logarithms.max())
    return np.asarray(chance / chance.sum())


def _fitted(others: Floats, odds: Floats, means: Floats, terms: Floats) -> Floats:
    """Odds of one supernode, (2,), nearer to its means: Newton's steps on the entropy's dual, halved until they lower it."""

    def dual(odds: Floats) -> float:
        logarithms = others + odds @ terms
        most = float(logarithms.max())
        return most + float(np.log(np.exp(logarithms - most).sum())) - float(odds @ means)

    for _ in range(STEPS):
        chance = _chance(others + odds @ terms)
        mean = terms @ chance
        spread = (terms * chance) @ terms.T - np.outer(mean, mean) + 1e-12 * np.eye(2)
        step, here = np.linalg.solve(spread, means - mean), dual(odds)
        shares = 0.5 ** np.arange(HALVINGS)
        odds = next((odds + share * step for share in shares if dual(odds + share * step) <= here), odds)
    return odds
