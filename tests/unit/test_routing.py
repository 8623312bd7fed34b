"""Which experts tokens go to: what a routing accepts, and that its counts are possible."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from memlab.config.routing import Routing, find_routing
from tests.unit.corruption import corruptions
from tests.unit.refusal import refusal


@pytest.mark.parametrize("values", [{"factor": True}, {"seed": "x"}, {"kind": "shares", "shares": [True]}])
def test_a_routing_holds_what_its_types_say(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose balanced, random:SEED"):
        Routing(**values)


def test_no_expert_gets_more_rows_than_there_are_tokens() -> None:
    assert Routing(kind="shares", shares=(1 / 12, 1 / 2, 5 / 12)).tokens_per_expert(3, 3, 2, 0) == [1, 3, 2]
    rng = random.Random(0)
    for _ in range(500):
        parts = [rng.randint(0, 12) for _ in range(5)]
        shares = tuple(part / sum(parts) for part in parts) if sum(parts) else (1.0,)
        if len(shares) != 5 or max(shares) > 0.5:
            continue
        for tokens in (1, 3, 7):
            counts = Routing(kind="shares", shares=shares).tokens_per_expert(tokens, 5, 2, 0)
            assert sum(counts) == 2 * tokens and min(counts) >= 0 and max(counts) <= tokens


def test_a_damaged_file_of_shares_is_refused_in_a_line_or_read(tmp_path: Path) -> None:
    path, refused = tmp_path / "shares.json", 0
    for damaged in corruptions(json.dumps([0.125] * 8).encode(), "json", seed=4):
        path.write_bytes(damaged)
        refused += bool(refusal(lambda: find_routing(str(path)).check(8, 2)))
    assert refused > 100
