"""The largest workload that fits: a length of sequences, a number of sequences, or the tokens of a packed micro-batch.

It is found by bisection on predicted steps of every kind of rank. The peak grows almost linearly with the workload, so
the next value to try is interpolated. That saves steps, and changes no answer: the value below the limit and the value
above it are both predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from memlab.config.fp8_restrictions import required_multiple_of_tokens
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import VERDICTS, Verdict, basis_of
from memlab.fitting.interrupted import Interrupted
from memlab.fitting.measured_margin import limit_with_margin
from memlab.fitting.prediction import Prediction, PredictionLostError
from memlab.units import format_bytes

What = Literal["tokens", "seq-length", "micro-batch-size"]
WHATS: tuple[What, ...] = ("tokens", "seq-length", "micro-batch-size")

_GUESSES = 2
"""How many values are taken from the line through two others."""
_MULTIPLE = 64
"""Long sequences are tried in multiples of it, which kernels like, and of what the layout requires."""
_LONG = 1024

PredictAll = Callable[[Sequence[Scenario], Sequence[Scenario]], list[Prediction]]
"""Predicts a step on each of the first scenarios; the others may be asked for next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One value, and what its steps were predicted to need."""

    value: int
    verdict: Verdict
    """The worst of the ranks."""
    rank: int
    """That rank."""
    peak_allocated_bytes: int
    """The highest of the ranks."""
    margin_bytes: int
    """The limit less that peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The answer, and all values that were predicted."""

    what: What
    """``seq-length``: the tokens of a sequence. ``micro-batch-size``: the sequences of a micro-batch. ``tokens``: those
    of a micro-batch that is one packed row, so the sequence length at a micro-batch size of 1. The number of
    micro-batches stays as it is."""
    scenario: Scenario
    """On the first of the ranks, with the value that it was given."""
    settings: MemorySettings
    limit_bytes: int
    outside_torch_bytes: int
    unit: int
    """All values are multiples of it."""
    most: int
    """memlab takes no larger value."""
    tried: tuple[Tried, ...]
    """From the smallest value to the largest."""
    is_complete: bool = True
    """Whether the search came to its end."""

    def _most_with(self, *verdicts: Verdict) -> int | None:
        return _largest_before_another({one.value: one for one in self.tried}, verdicts)

    @property
    def largest_that_fits(self) -> int | None:
        """The largest value that fits, if all smaller ones that were tried fit too; None if there is none.

        Near the limit fragmentation decides, and a larger value may then fit where a smaller one does not.
        """
        return self._most_with("fits")

    @property
    def largest_that_may_fit(self) -> int | None:
        """Like `largest_that_fits`, but for values that fit or may fit."""
        return self._most_with("fits", "may fit")

    @property
    def smallest_that_does_not_fit(self) -> int | None:
        """The next value that was predicted not to fit; None if all fit."""
        return min((one.value for one in self.tried if one.verdict == "does not fit"), default=None)

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        sure, most, over = self.largest_that_fits, self.largest_that_may_fit, self.smallest_that_does_not_fit
        by_value = {one.value: one for one in self.tried}
        limit = f"{format_bytes(self.limit_bytes)} for torch"
        if most is None:
            assert over is not None
            least = by_value[over]
            text = f"'{self.settings}' does not fit {limit} even with {self._words(over)}"
            text += f": rank {least.rank} is short by {format_bytes(max(0, -least.margin_bytes))}"
        else:
            parts = [] if sure is None else [f"fits with up to {self._words(sure)}"]
            if most != sure:
                parts.append(f"may fit with up to {self._words(most)}")
            spare = format_bytes(by_value[most].margin_bytes)
            end = f"and memlab takes no more than {self.most:,}"
            if over is not None:
                short = -by_value[over].margin_bytes
                why = f"short by {format_bytes(short)}" if short > 0 else "memory is fragmented"
                end = f"with {over:,} it does not fit (rank {by_value[over].rank}, {why})"
            text = f"'{self.settings}' {', '.join(parts)} ({spare} to spare of {limit}); {end}"
        cut = "" if self.is_complete else "; CUT SHORT: the values between were not tried"
        return f"{text}{cut}; based on {basis_of(self.scenario)}"

    def _words(self, value: int) -> str:
        ranks = self.scenario.layout.context_parallel_size
        share = f" ({value // ranks:,} per context-parallel rank)" if ranks > 1 else ""
        if self.what == "tokens":
            return f"{value:,} tokens in a micro-batch of one packed row{share}"
        if self.what == "seq-length":
            return f"sequences of {value:,} tokens{share}, {self.scenario.micro_batch_size} in a micro-batch"
        return f"{value:,} sequences of {self.scenario.seq_length:,} tokens in a micro-batch"

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        derived = ("verdict", "largest_that_fits", "largest_that_may_fit", "smallest_that_does_not_fit")
        values = {name: getattr(self, name) for name in (*derived, *self.__slots__)}
        tried = [asdict(one) for one in self.tried]
        return values | {"scenario": self.scenario.to_dict(), "settings": self.settings.to_dict(), "tried": tried}


class LargestInterrupted(Interrupted[Largest]):
    """The end of a search that has predicted at least one value."""


def unit_of(what: What, scenario: Scenario) -> int:
    """Returns the number of which all tried values are multiples.

    Layout and FP8 require such a number. For long sequences it is also a multiple of 64. Under context parallelism each
    rank has two chunks of a sequence, and under tensor parallelism it shares them.
    """
    ranks, context = scenario.layout.ranks_of_a_sequence, scenario.layout.context_parallel_size
    of_rank = required_multiple_of_tokens(scenario.state, scenario.layout)
    if what == "micro-batch-size":
        return of_rank // math.gcd(of_rank, scenario.seq_length // ranks)
    if what == "seq-length":
        of_rank //= math.gcd(of_rank, scenario.micro_batch_size)
    required = math.lcm(ranks * of_rank, 2 * context if context > 1 else 1)
    return math.lcm(required, _MULTIPLE) if scenario.seq_length >= _LONG else required


def with_value(scenario: Scenario, what: What, value: int) -> Scenario:
    """Returns the scenario with another workload.

    Raises:
        ValueError: If memlab takes no such value.
    """
    if what == "micro-batch-size":
        return replace(scenario, micro_batch_size=value)
    sequences = 1 if what == "tokens" else scenario.micro_batch_size
    return replace(scenario, micro_batch_size=sequences).with_tokens_of_a_row(value)


def largest(
    what: What,
    settings: MemorySettings,
    scenarios: Sequence[Scenario],
    predict_all: PredictAll,
    limit_bytes: int,
    *,
    outside_torch_bytes: int = 0,
    on_tried: Callable[[Tried], object] = lambda tried: None,
) -> Largest:
    """Finds the largest value with which a step fits.

    Args:
        scenarios: The job on every rank that is judged: the worst of them counts.
        predict_all: Predicts steps under the settings, judged by the limit.
        outside_torch_bytes: What else is on the GPU; only copied to the result.

    Raises:
        LargestInterrupted: At Ctrl-C or `PredictionLostError`, with what was found until then.
    """
    bisection = _Bisection(what, scenarios, predict_all, limit_bytes, on_tried)

    def found(*, is_complete: bool) -> Largest:
        return Largest(
            what=what,
            scenario=scenarios[0],
            settings=settings,
            limit_bytes=limit_bytes,
            outside_torch_bytes=outside_torch_bytes,
            unit=bisection.unit,
            most=bisection.most * bisection.unit,
            tried=tuple(sorted(bisection.tried.values(), key=lambda one: one.value)),
            is_complete=is_complete,
        )

    try:
        bisection.find(("fits", "may fit"))
        bisection.find(("fits",))
        bisection.find(("fits", "may fit"))  # the search before may have met a smaller value that does not fit
    except (KeyboardInterrupt, PredictionLostError) as interrupt:
        if not bisection.tried:
            raise
        raise LargestInterrupted(found(is_complete=False)) from interrupt
    return found(is_complete=True)


def _largest_before_another(tried: Mapping[int, Tried], verdicts: Collection[Verdict]) -> int | None:
    """Returns the largest value with one of the verdicts that is smaller than every value with another verdict."""
    largest_value = None
    for value, one in sorted(tried.items()):
        if one.verdict not in verdicts:
            break
        largest_value = value
    return largest_value


class _Bisection:
    """Values are counted in units here."""

    def __init__(
        self,
        what: What,
        scenarios: Sequence[Scenario],
        predict_all: PredictAll,
        limit_bytes: int,
        on_tried: Callable[[Tried], object],
    ) -> None:
        self._what = what
        self._scenarios = scenarios
        self._predict_all = predict_all
        self._limit_bytes = limit_bytes
        self._on_tried = on_tried
        self.unit = unit_of(what, scenarios[0])
        self.most = self._most()
        self.tried: dict[int, Tried] = {}

    def find(self, verdicts: tuple[Verdict, ...]) -> None:
        """Tries values until two that follow each other are known, of which only the lower has one of the verdicts."""
        scenario = self._scenarios[0]
        given = scenario.micro_batch_size if self._what == "micro-batch-size" else scenario.seq_length
        if not self.tried:
            self._try(min(self.most, max(1, given // self.unit)))
        target = self._limit_bytes
        if "may fit" not in verdicts:
            target = limit_with_margin(target, scenario)
        num_guesses, reach, side = 0, 1, 0
        while True:
            lower = _largest_before_another(self.tried, verdicts) or 0
            upper = min((value for value in self.tried if value > lower), default=self.most + 1)
            if upper - lower == 1:
                return
            if num_guesses < _GUESSES or upper > self.most or lower == 0:
                value = self._on_line(lower, upper, target)
                if lower == 0 and value >= upper:  # the peak is below the target, and fragmentation decides
                    value = upper // 2
                num_guesses += 1
            elif side:  # the line misses the limit, because fragmentation decides: away from it in steps that double
                reach *= 2
                value = lower + reach if side > 0 else upper - reach
            else:
                value = (lower + upper) // 2
            value = min(max(value, lower + 1), upper - 1)
            self._try(value)
            now = 1 if self.tried[value].verdict in verdicts else -1
            side = now if (num_guesses <= _GUESSES and reach == 1) or now == side else 0

    def _on_line(self, lower: int, upper: int, target: int) -> int:
        """Returns the largest value whose peak is within the target, on the line through the nearest known values."""
        distance = {value: min(abs(value - lower), abs(value - upper)) for value in self.tried}
        near = sorted(sorted(self.tried, key=distance.__getitem__)[:2])
        if len(near) < 2:
            return 2 * near[0] if near[0] == lower else near[0] // 2
        (first, one), (second, other) = ((value, self.tried[value].peak_allocated_bytes) for value in near)
        if other <= one:
            return (lower + min(upper, 4 * max(1, lower))) // 2
        return math.floor(first + (second - first) * (target - one) / (other - one))

    def _try(self, value: int) -> None:
        following = self._at(value + 1) if value < self.most else []
        ranks = self._predict_all(self._at(value), following)
        worst = max(ranks, key=lambda rank: (VERDICTS.index(rank.verdict), rank.peak_allocated_bytes))
        peak = max(rank.peak_allocated_bytes for rank in ranks)
        self.tried[value] = tried = Tried(
            value=value * self.unit,
            verdict=worst.verdict,
            rank=worst.rank,
            peak_allocated_bytes=peak,
            margin_bytes=self._limit_bytes - peak,
        )
        self._on_tried(tried)

    def _at(self, value: int) -> list[Scenario]:
        return [with_value(scenario, self._what, value * self.unit) for scenario in self._scenarios]

    def _most(self) -> int:
        """Returns the largest value that memlab's own rules allow."""
        lower, upper = 0, 2**27
        while upper - lower > 1:
            middle = (lower + upper) // 2
            try:
                with_value(self._scenarios[0], self._what, middle * self.unit)
                lower = middle
            except ValueError:
                upper = middle
        return lower
