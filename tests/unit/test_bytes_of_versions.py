"""The report of what another version changes in bytes names the step, the figure and both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bytes_of_versions import FIGURES, compare


def row(**changed: Any) -> dict[str, Any]:
    same = dict.fromkeys(FIGURES, 4096) | {"at the peak": {"activations": 1024}, "of modules": {"decoder": 1024}}
    return {"case": "phi-4, none", "versions": {"megatron-core": "0.16.1"}} | same | changed


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"peak_allocated_bytes": 5120}, "| phi-4, none | peak_allocated_bytes | 4,096 | 5,120 | +1,024 |"),
        ({"at the peak": {"recomputed": 1}}, "| phi-4, none | recomputed, at the peak | 0 | 1 | +1 |"),
        ({"of modules": {}}, "| phi-4, none | decoder, of modules | 1,024 | 0 | -1,024 |"),
        ({"error": "ImportError: gone"}, "| phi-4, none | failed | no | ImportError: gone |  |"),
    ],
)
def test_a_step_that_differs_is_named_with_both_values(
    changed: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    before.write_text(json.dumps(row()) + "\n")
    after.write_text(json.dumps(row()) + "\n")
    assert compare(before, after) == 0
    after.write_text(json.dumps(row(**changed)) + "\n")
    capsys.readouterr()
    assert compare(before, after) == 1
    assert line in capsys.readouterr().out.splitlines()
