"""Goals for the numbers that a formula gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from memlab.exercises.goals import Goals


class FormulaCheck(Goals):
    """Goals for the numbers that a formula gave, for one case (a model, a number of tokens) or for each of several."""

    subject = "numbers"

    def __init__(self, numbers: Sequence[float], given: object = None) -> None:
        """Begins the goals.

        Args:
            numbers: What the formula gave.
            given: The reader's answer itself, to notice the numbers that the goal compares with.
        """
        super().__init__()
        self._numbers = list(numbers)
        self._given = given

    def is_exactly(
        self, num_bytes: int | Sequence[int], hint: str = "ask of each module which tensors it keeps"
    ) -> Self:
        """Requires what memlab counted: in one case, or in each, in the order of the formula's results.

        Args:
            num_bytes: What memlab counted, for one case or for each. If the formula is wrong for the first case, the
                line says by how many bytes. For a later case, it says only whether the formula gives too few or too
                many bytes, so that no line gives all counts away.
            hint: What to look at, in the words of the exercise.
        """
        counted = [num_bytes] if isinstance(num_bytes, int) else num_bytes
        if self._is_no_formula(counted):
            return self
        for place, (mine, needed) in enumerate(zip(self._numbers, counted, strict=True), start=1):
            which = f" for case {place}" if len(counted) > 1 else ""
            if not math.isclose(mine, needed, rel_tol=_ROUNDING_OF_FLOATS):
                off = f"{_number(abs(needed - mine))} " if place == 1 else ""
                off = f"{off}too {'few' if needed > mine else 'many'}" if math.isfinite(mine) else "must be finite"
                return self.goal(False, f"the formula gives {_number(mine)} bytes{which}, {off}", hint)
        given = " and ".join(_number(mine) for mine in self._numbers)
        return self.goal(True, f"the formula gives {given} bytes, exactly as many as memlab counted")

    def is_about(self, values: Sequence[float], unit: str, hint: str, within: float = 0.01) -> Self:
        """Requires a value in each case, to within a share of it.

        Args:
            values: One per case, in the order of the formula's results.
            unit: Of the values, such as ``tokens``.
            hint: What to look at, in the words of the exercise.
            within: The share by which a result may differ.
        """
        if self._is_no_formula(values):
            return self
        for place, (mine, needed) in enumerate(zip(self._numbers, values, strict=True), start=1):
            if not math.isclose(mine, needed, rel_tol=within):
                off = f"too {'small' if needed > mine else 'large'}" if math.isfinite(mine) else "must be finite"
                return self.goal(False, f"the formula gives {_number(mine)} {unit} for case {place}, {off}", hint)
        given = " and ".join(_number(mine) for mine in self._numbers)
        return self.goal(True, f"{given} {unit}: right to within {within:.0%}")

    def _is_no_formula(self, needed: Sequence[float]) -> bool:
        """Whether the answer is the very list of the right numbers, or not one result per case; the line says so."""
        if self._given is needed:
            self.goal(False, "these are the numbers with which the check compares, must be a formula in letters")
            return True
        if len(self._numbers) == len(needed):
            return False
        given = "1 result" if len(self._numbers) == 1 else f"{len(self._numbers)} results"
        what = f"the formula gives {given}, must give {len(needed)}, one per case"
        self.goal(False, what, "replace only the 0 in the marked line")
        return True


_ROUNDING_OF_FLOATS = 1e-12
"""A formula with a division is right within this share: floating-point numbers are rounded."""


def _number(value: float) -> str:
    """Writes a number: a whole one without decimals, a fraction with few of them."""
    if not math.isfinite(value):
        return f"{value}"
    rounded = round(value, 2)
    return f"{value:.1g}" if value and not rounded else f"{rounded:,.2f}".removesuffix("0").removesuffix(".0")
