"""A table of the bytes that a formula gives and of those that memlab metered, with their difference."""

from __future__ import annotations

from collections.abc import Mapping

from memlab.views.text.columns import Block, Table


def formula_blocks(
    formula: Mapping[str, int],
    metered: Mapping[str, int],
    *,
    tokens: int = 1,
    titles: tuple[str, str] = ("formula", "metered"),
    with_sum: bool = True,
) -> list[Block]:
    """Describes each module by one row, and the sum by the last.

    Args:
        formula: Bytes by module, as derived by hand.
        tokens: A number by which the first column of numbers divides the metered bytes; with 1 there is no such column.
        titles: The titles of the two columns that are compared.

    Raises:
        ValueError: If both are empty.
    """
    if not {**formula, **metered}:
        raise ValueError("line_by_line got two empty dicts, must have a module: pass what kept_by_module(record) gave")
    rows = {name: (formula.get(name, 0), metered.get(name, 0)) for name in {**formula, **metered}}
    if with_sum:
        rows["sum"] = (sum(formula.values()), sum(metered.values()))
    table = [
        ["", *([f"{titles[1]} bytes"] if tokens > 1 else []), *titles, "difference"],
        ["", *(["per token"] if tokens > 1 else []), "bytes", "bytes", "bytes"],
    ]
    for name, (by_hand, by_meter) in rows.items():
        share = [f"{by_meter / tokens:,.3f}".rstrip("0").rstrip(".")] if tokens > 1 else []
        table.append([name, *share, f"{by_hand:,}", f"{by_meter:,}", f"{by_hand - by_meter:,}"])
    return [Table(table, num_head_rows=2)]
