"""Goals for the numbers that a formula gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from memlab.exercises.goals import Goals, listed


class FormulaCheck(Goals):
    """Goals for the numbers that a formula gave, for one case (a model, a number of tokens) or for each of several."""

    subject = "numbers"

    def __init__(self, numbers: Sequence[float], given: object = None) -> None:
        """Begins the goals; `given` is the reader's answer itself, to notice numbers that the goal compares with."""
        super().__init__()
        self._numbers = list(numbers)
        self._given = given

    def is_exactly(
        self,
        num_bytes: int | Sequence[int],
        hint: str = "ask of each module which tensors it keeps",
        tokens: Sequence[int] = (),
    ) -> Self:
        """Requires what memlab counted: in one case, or in each, in the order of the formula's results.

        Args:
            num_bytes: What memlab counted, for one case or for each. If the formula is wrong for the first case, the
                line says by how many bytes. For a later case, it says only whether the formula gives too few or too
                many bytes, so that no line gives all counts away.
            hint: What to look at, in the words of the exercise.
            tokens: Of each case, so that a right formula per token is recognized.
        """
        counted = [num_bytes] if isinstance(num_bytes, int) else num_bytes
        if self._is_no_formula(counted) or self._is_in_another_unit(counted, "bytes", tokens, _ROUNDING_OF_FLOATS):
            return self
        for place, (mine, needed) in enumerate(zip(self._numbers, counted, strict=True), start=1):
            which = f" for case {place}" if len(counted) > 1 else ""
            if not math.isclose(mine, needed, rel_tol=_ROUNDING_OF_FLOATS):
                off = f"{_number(abs(needed - mine))} " if place == 1 else ""
                off = f"{off}too {'few' if needed > mine else 'many'}" if math.isfinite(mine) else "must be finite"
                return self.goal(False, f"the formula gives {_number(mine)} bytes{which}, {off}", hint)
        given = " and ".join(_number(mine) for mine in self._numbers)
        return self.goal(True, f"the formula gives {given} bytes, exactly as many as memlab counted")

    def is_about(
        self,
        values: Sequence[float],
        unit: str,
        hint: str,
        within: float | Sequence[float] = 0.01,
        tokens: Sequence[int] = (),
        measured: bool = False,
    ) -> Self:
        """Requires a value in each case, to within a share of it.

        Args:
            values: One per case, in the order of the formula's results.
            unit: Of the values, such as ``tokens``.
            hint: What to look at, in the words of the exercise.
            within: The share by which a result may differ, in all cases or in each; 0 allows only rounded floats.
            tokens: As for `is_exactly`.
            measured: Whether no formula gives all values exactly, so that a result that does is a copy of them.
        """
        shares = [max(each, _ROUNDING_OF_FLOATS) for each in (within if isinstance(within, Sequence) else [within])]
        shares *= len(values) // len(shares)
        if self._is_no_formula(values, measured) or self._is_in_another_unit(values, unit, tokens, max(shares)):
            return self
        for place, (mine, needed, share) in enumerate(zip(self._numbers, values, shares, strict=True), start=1):
            if not math.isclose(mine, needed, rel_tol=share):
                off = f"too {'small' if needed > mine else 'large'}" if math.isfinite(mine) else "must be finite"
                if max(values) <= 1 < mine < math.inf:
                    off = "must be a share from 0 to 1; if it is in per cent, divide by 100"
                return self.goal(False, f"the formula gives {_number(mine)} {unit} for case {place}, {off}", hint)
        given = " and ".join(_number(mine) for mine in self._numbers)
        exact = [str(place) for place, share in enumerate(shares, start=1) if share == _ROUNDING_OF_FLOATS]
        how = f"to within {max(shares):.0%}"
        if len(exact) == len(shares):
            how = "exactly"
        elif exact:
            how = f"exactly for case{'s' * (len(exact) > 1)} {listed(exact)}, else {how}"
        return self.goal(True, f"{given} {unit}: right {how}")

    def _is_no_formula(self, needed: Sequence[float], measured: bool = False) -> bool:
        """Whether the answer is the list of the right numbers itself, or not one result per case; the line says so."""
        if self._given is needed or (measured and self._numbers == [*needed]):
            self.goal(False, "these are the numbers with which the check compares, must be a formula in letters")
            return True
        if len(self._numbers) == len(needed):
            return False
        given = "1 result" if len(self._numbers) == 1 else f"{len(self._numbers)} results"
        what = f"the formula gives {given}, must give {len(needed)}, one per case"
        self.goal(False, what, "replace only the 0 in the marked line")
        return True

    def _is_in_another_unit(self, needed: Sequence[float], unit: str, tokens: Sequence[int], within: float) -> bool:
        """Whether the formula is right in every case but for its unit or its sign; the line says what is asked for."""
        others = [("right but for its sign", "must have the other one", [-1.0] * len(needed))]
        if unit == "bytes":
            others += [(f"right in {name}", "must give bytes", [1.0 * size] * len(needed)) for name, size in _UNITS]
            per_token = (
                "right per token",
                "must give the bytes of all tokens of a case",
                [1.0 * each for each in tokens],
            )
            others += [per_token] if tokens else []
        elif max(needed) <= 1:
            others.append(("right in per cent", "must give a share from 0 to 1", [0.01] * len(needed)))
        if self._agrees(needed, [1.0] * len(needed), within):
            return False  # only zeros, for example, are right in every unit
        for what, asked, factors in others:
            if self._agrees(needed, factors, within):
                self.goal(False, f"the formula gives {_number(self._numbers[0])} for case 1, which is {what}, {asked}")
                return True
        return False

    def _agrees(self, needed: Sequence[float], factors: Sequence[float], within: float) -> bool:
        cases = zip(self._numbers, factors, needed, strict=True)
        return all(math.isclose(mine * factor, value, rel_tol=within) for mine, factor, value in cases)


_ROUNDING_OF_FLOATS = 1e-12
"""A formula with a division is right within this share: floating-point numbers are rounded."""


_UNITS = (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("MB", 10**6), ("GB", 10**9))
"""Units in which a lab's text, guesses and tables give bytes, or a reader does."""


def _number(value: float) -> str:
    """Writes a number: a whole one without decimals, a fraction with few of them."""
    if not math.isfinite(value):
        return f"{value}"
    rounded = round(value, 2)
    return f"{value:.1g}" if value and not rounded else f"{rounded:,.2f}".removesuffix("0").removesuffix(".0")
