"""Which experts tokens go to on the simulated backend, where no router computes it.

On one rank the sum over the experts is always the same. With experts spread over ranks, the rank with the popular
experts holds more rows than the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from memlab.config.from_json import parse_json, read_json
from memlab.config.validation import is_number, is_whole_number, shortened

KINDS = ("balanced", "random", "skewed", "shares", "counts")
_MOST = 2**40
"""Tokens of an expert."""
_CHOICES = (
    "choose balanced, random:SEED, skewed:FACTOR, or a JSON list, given here or as the path of a file, with either the "
    "share of each expert, or for each layer a list with the number of tokens of each expert"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the tokens of a micro-batch are spread over the experts: ``random`` anew in every layer and micro-batch.

    Raises:
        ValueError: If a value breaks its rule.
    """

    kind: Literal["balanced", "random", "skewed", "shares", "counts"] = "balanced"
    """``balanced``: equal shares. ``random``: each token chooses uniformly among all experts. ``skewed``: the first
    expert gets `factor` times the mean, and each further one less by the same ratio. ``shares``: those given, in every
    layer. ``counts``: those given, by layer, such as a router's own."""
    seed: int = 0
    """For ``random``; each rank draws its own choices in each layer and micro-batch, the same in every step."""
    factor: float = 1.0
    shares: tuple[float, ...] = ()
    """For ``shares``: each expert's share of all routed tokens; they sum to 1."""
    counts: tuple[tuple[int, ...], ...] = ()
    """For ``counts``: how many tokens each expert got, by layer. More layers than these repeat them, and another number
    of tokens is divided in the same proportions."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"routing is {shortened(self.kind)}, must be one of {', '.join(KINDS)}: {_CHOICES}")
        if not is_whole_number(self.seed, at_least=-(2**63), at_most=2**63 - 1):
            raise ValueError(f"routing random has seed {shortened(self.seed)}, must be a whole number: {_CHOICES}")
        if not is_number(self.factor) or not 1 <= self.factor < math.inf:
            raise ValueError(
                f"routing skewed has factor {shortened(self.factor)}, must be a number of at least 1: {_CHOICES}"
            )
        try:
            shares, counts = tuple(self.shares), tuple(tuple(layer) for layer in self.counts)  # JSON knows no tuples
        except TypeError as error:
            raise ValueError(
                f"routing has shares {shortened(self.shares)} and counts {shortened(self.counts)}, must be a tuple of "
                f"shares, and a tuple of numbers for each layer: {_CHOICES}"
            ) from error
        object.__setattr__(self, "shares", shares)
        object.__setattr__(self, "counts", counts)
        if self.kind == "shares":
            wrong = [share for share in self.shares if not is_number(share) or not 0 <= share <= 1]
            if wrong or not math.isclose(sum(self.shares), 1, abs_tol=1e-6):
                what = shortened(wrong[0]) if wrong else f"a sum of {sum(self.shares):g}"
                raise ValueError(f"routing has shares with {what}, must be from 0 to 1 with a sum of 1: {_CHOICES}")

        if self.kind == "counts":
            self._check_counts()

    def _check_counts(self) -> None:
        wrong = [
            count for layer in self.counts for count in layer if not is_whole_number(count, at_least=0, at_most=_MOST)
        ]
        if wrong or not self.counts or not all(map(any, self.counts)):
            what = shortened(wrong[0]) if wrong else "a layer without tokens" if self.counts else "no layer"
            raise ValueError(f"routing has counts with {what}, must be whole numbers by layer: {_CHOICES}")

    def check(self, num_experts: int, topk: int) -> None:
        """Checks the routing against a model's experts.

        Raises:
            ValueError: If the model's experts cannot get these shares or counts.
        """
        given = {"shares": (self.shares,), "counts": self.counts}.get(self.kind, ())
        for layer in given:
            if len(layer) != num_experts:
                raise ValueError(
                    f"routing has {len(layer)} {self.kind}, must be {num_experts}, one per expert: {_CHOICES}"
                )
        most = num_experts / topk
        highest = max((max(layer) / sum(layer) * num_experts for layer in given), default=self.factor)
        if highest > most + 1e-6:
            raise ValueError(
                f"routing gives an expert {highest:g} times the mean, must give it at most {most:g} times (each "
                f"token goes to {topk} of "
                f"{num_experts} experts, and to none of them twice): give a smaller factor or share"
            )

    def tokens_per_expert(
        self, num_tokens: int, num_experts: int, topk: int, rank: int, *, layer: int = 0, microbatch: int = 0
    ) -> list[int]:
        """Returns how many tokens of a rank's micro-batch each expert gets; the sum is `num_tokens` x `topk`.

        Args:
            num_tokens: Of one micro-batch on one rank.
            num_experts: Of a layer.
            topk: Experts that a token chooses.
            layer: Only ``random`` and ``counts`` depend on it.
            microbatch: Only ``random`` depends on it: a router chooses anew in each.
        """
        total = num_tokens * topk
        if self.kind == "random":
            rng = np.random.default_rng([self.seed % 2**63, rank, layer, microbatch])
            return _random_counts(rng, num_tokens, num_experts, topk)
        if self.kind == "shares":
            shares = self.shares
        elif self.kind == "counts":
            of_layer = self.counts[layer % len(self.counts)]
            shares = tuple(count / sum(of_layer) for count in of_layer)
        else:
            shares = _geometric_shares(num_experts, self.factor if self.kind == "skewed" else 1.0)
        ends = [0, *(round(total * share) for share in accumulate(shares[:-1])), total]
        counts = [end - start for start, end in pairwise(ends)]
        # Rounding may give an expert one row more than there are tokens; a token cannot choose an expert twice.
        for expert in range(num_experts):
            while counts[expert] > num_tokens:
                counts[expert] -= 1
                counts[counts.index(min(counts))] += 1
        return counts

    def __str__(self) -> str:
        return {"random": f"random:{self.seed}", "skewed": f"skewed:{self.factor:g}"}.get(self.kind, self.kind)


def find_routing(text: str) -> Routing:
    """Reads ``balanced``, ``random:SEED``, ``skewed:FACTOR``, or a JSON list, or a file with it.

    A list has one share per expert, or for each layer a list with the tokens of each expert.

    Raises:
        ValueError: If the text is not one of them.
    """
    if text == "balanced":
        return Routing()
    name, colon, value = text.partition(":")
    if colon and name in ("random", "skewed"):
        try:
            number = int(value) if name == "random" else float(value)
        except ValueError as error:
            raise ValueError(f"routing is {shortened(text)}, must have a number after the colon: {_CHOICES}") from error
        return Routing(kind="random", seed=int(number)) if name == "random" else Routing(kind="skewed", factor=number)
    try:
        shares = parse_json(text, "it", _CHOICES) if text.startswith("[") else read_json(Path(text), _CHOICES)
    except ValueError as error:
        raise ValueError(f"routing is {shortened(text)}: {error}") from error
    if not isinstance(shares, list):
        raise ValueError(f"routing is {shortened(text)}, which does not contain a list: {_CHOICES}")
    if shares and all(isinstance(layer, list) for layer in shares):
        return Routing(kind="counts", counts=tuple(shares))
    return Routing(kind="shares", shares=tuple(shares))


def reached_tokens(
    num_tokens: int, rows: Sequence[int], experts: Sequence[int], topk: int, groups: tuple[int | None, int | None]
) -> int:
    """Returns how many of a rank's tokens choose at least one of some experts.

    How many rows each expert gets does not say which of them are of one token. A token is taken to choose its experts
    at random, with the share that these have of all rows; the number then lies within its bounds: at least the rows of
    the fullest of the experts, and so many that no token has more rows than it may choose; at most all rows.

    Args:
        num_tokens: Of the rank.
        rows: For each expert of the layer, how many of the rank's tokens choose it.
        groups: How many groups the experts have, and from how many of them a token chooses; None for no groups.
    """
    of_experts = sum(rows[expert] for expert in experts)
    if not of_experts:
        return 0
    places = len(rows) * of_experts / sum(rows)
    num_groups, chosen_groups = groups
    if num_groups is None or chosen_groups is None:
        missing = _missing(places, len(rows), topk)
    else:
        size = len(rows) // num_groups
        own = max(1, round(len(experts) / size))
        missing = 0.0
        for among in range(max(0, chosen_groups - num_groups + own), min(own, chosen_groups) + 1):
            ways = math.comb(own, among) * math.comb(num_groups - own, chosen_groups - among)
            share = ways / math.comb(num_groups, chosen_groups)
            missing += share * _missing(places / own * among, chosen_groups * size, topk)
    fewest = max(*(rows[expert] for expert in experts), -(-of_experts // min(topk, len(experts))))
    return min(max(round(num_tokens * (1 - missing)), fewest), num_tokens, of_experts)


def _missing(places: float, num_experts: int, topk: int) -> float:
    """Returns the share of tokens whose `topk` of `num_experts` are none of those that fill some places."""
    return math.prod(max(0.0, 1 - places / (num_experts - chosen)) for chosen in range(topk))


def _random_counts(rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int) -> list[int]:
    """Returns how many tokens choose each expert, if each token chooses uniformly among all.

    Tokens differ only in how many experts they have still to choose. One with j left chooses the next of m experts with
    probability j / m.
    """
    left = np.arange(topk + 1)
    tokens = np.zeros(topk + 1, dtype=np.int64)
    tokens[topk] = num_tokens
    counts = []
    for remaining in range(num_experts, 0, -1):
        choosing = rng.binomial(tokens, np.minimum(left / remaining, 1.0))
        tokens -= choosing
        tokens[:-1] += choosing[1:]
        counts.append(int(choosing.sum()))
    return counts


def _geometric_shares(count: int, factor: float) -> tuple[float, ...]:
    """Returns shares that fall by one ratio, the first of which is `factor` times the mean."""
    low, high = 0.0, 1.0  # bounds of the ratio: from 0 to 1, the first share falls from 1 to 1 / count
    for _ in range(60):
        ratio = (low + high) / 2
        first = 1 / sum(ratio**index for index in range(count))
        low, high = (ratio, high) if first * count > factor else (low, ratio)
    powers = [high**index for index in range(count)]
    total = sum(powers)
    return tuple(power / total for power in powers)
