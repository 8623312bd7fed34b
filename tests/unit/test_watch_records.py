"""What watched blocks are good for over several steps: a diagnosis, a saved record, a comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memlab
from memlab.cli import main
from memlab.record.saved_records import load_record
from memlab.record.watch_record import WatchRecord
from memlab.views.text.watch import watch_table
from memlab.watching.run import Run
from tests.unit.builders import record_of, training_step
from tests.unit.corruption import corruptions
from tests.unit.refusal import refusal

WIDTH, BATCH, STEPS = 1024, 512, 4  # large beside what other tests of the process still hold


def watched_steps(keep: Callable[[torch.Tensor], object], *, accumulate_first: bool = False) -> list[Run]:
    """Returns the runs of some steps, after each of which `keep` gets the loss, which has its graph."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    if not accumulate_first:
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    runs = []
    for _ in range(STEPS):
        with memlab.watch(model, optimizer) as run:
            loss = model(torch.ones(BATCH, WIDTH)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            keep(loss)
            del loss
        runs.append(run)
    return runs


def test_a_leak_a_retention_a_growth_and_steady_steps_of_a_plain_program_are_told_apart() -> None:
    kept: list[torch.Tensor] = []
    last: dict[str, torch.Tensor] = {}
    kinds = {
        "leak": watched_steps(kept.append),
        "retention": watched_steps(lambda loss: last.update(loss=loss)),
        "growth": watched_steps(lambda loss: None, accumulate_first=True),
        "steady": watched_steps(lambda loss: None),
    }
    # Whether the step's own memory is a spike, or the run is steady, depends on what else the process holds.
    found = {
        name: [finding.kind for finding in memlab.diagnose(runs) if finding.kind not in ("spike", "steady")]
        for name, runs in kinds.items()
    }
    assert found["leak"] == ["leak"]
    assert found["retention"] == ["growth by phase", "retention"]  # the first block finds nothing retained
    assert found["growth"] == ["growth by phase"]
    assert found["steady"] == []
    leak = memlab.diagnose(kinds["leak"])[0]
    saved_bytes = 2 * BATCH * WIDTH * 4  # the inputs of the product and of the square
    assert f"by {memlab.format_bytes(saved_bytes + 4)} per step" in leak.evidence
    retention = memlab.diagnose(kinds["retention"][1:])[0]
    assert retention.kind == "retention" and "lab." not in retention.advice
    assert "leak: step" in str(memlab.over_steps(kinds))
    assert memlab.worst(kinds["leak"]) is kinds["leak"][-1]
    assert memlab.probability_of_exceeding(kinds["steady"], 2**40, 100) == 0.0


def test_what_is_no_series_of_one_program_is_refused() -> None:
    runs = watched_steps(lambda loss: None)
    with memlab.watch(nn.ReLU()) as other:
        pass
    step = record_of(training_step())
    cases = {
        "2 records, must be at least 3": runs[:2],
        "different models": [*runs, other],
        "different settings": [*runs, step],
    }
    for words, records in cases.items():
        with pytest.raises(ValueError, match=f"^diagnose got .*{words}"):
            memlab.diagnose(records)  # type: ignore[arg-type]
    with memlab.watch(nn.ReLU()) as run:
        with pytest.raises(ValueError, match="has not ended"):
            memlab.diagnose([run, run, run])
        with pytest.raises(ValueError, match="has not ended"):
            memlab.finish({"step": run})


def test_a_watched_block_is_saved_loaded_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = watched_steps(lambda loss: None)[:2]
    folders = [run.save(tmp_path / name) for run, name in ((one, "one"), (two, "two"))]
    loaded = load_record(folders[0])
    assert isinstance(loaded, WatchRecord)
    assert loaded.to_dict() == one.to_dict() and watch_table(loaded) == watch_table(one)
    assert main(["compare", *map(str, folders)]) == 0
    assert "Linear (2) peaks in" in capsys.readouterr().out
    assert main(["compare", "--json", *map(str, folders)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["peak_allocated_bytes"] for each in printed["records"]] == [
        one.peak_allocated_bytes,
        two.peak_allocated_bytes,
    ]
    step = record_of(training_step()).save(tmp_path / "step")
    assert main(["compare", str(step), str(folders[0])]) == 2
    assert "1 watched blocks and 1 steps of labs, must be of one kind" in capsys.readouterr().err


def test_a_damaged_watched_block_is_loaded_as_it_was_or_refused(tmp_path: Path) -> None:
    run = watched_steps(lambda loss: None)[0]
    folder = run.save(tmp_path / "whole")
    path = folder / "record.json"
    whole = path.read_bytes()
    refused = 0
    for damaged in corruptions(whole, "json", seed=1):
        path.write_bytes(damaged)
        refused += bool(refusal(lambda: json.dumps(load_record(folder).to_dict())))
    assert refused > 100
    path.write_bytes(whole.replace(b'"static_bytes": ', b'"static_bytes": 1'))
    with pytest.raises(ValueError, match=r"static_bytes is 1\d+, must be that of the timeline"):
        load_record(folder)
    path.write_bytes(whole)
    (folder / "timeline.npz").unlink()
    with pytest.raises(ValueError, match=r"it has no timeline\.npz"):
        load_record(folder)
