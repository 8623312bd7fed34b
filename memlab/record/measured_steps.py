"""Measured steps that are kept in a file, one JSON object per line, such as labs/results/h200_steps.jsonl."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.from_json import parse_json
from memlab.config.scenario import Scenario
from memlab.config.versions import Versions
from memlab.lab_files import labs_folder
from memlab.record.step_record import StepRecord


def measured_steps(path: Path | str, architecture: str, **scenario: Any) -> dict[str, StepRecord]:
    """Reads the steps of one scenario from a file of measured steps.

    Args:
        path: The file, with one record per line. A line may also have the record under the key ``record``, next
            to others. A relative path that is not there is one below the folder of the labs: a lab reads
            ``results/h200_steps.jsonl`` from whatever folder it runs in.
        architecture: A known name (`memlab.ARCHITECTURES`).
        **scenario: Further arguments of a `Scenario`, such as ``num_layers``, ``seq_length``, ``layout`` and ``state``.
            What is left out has its default. The seed and the options of the allocator are not compared, and
            ``versions`` only if they are given.

    Returns:
        The first finished step under each memory setting, by the text of the setting (``"none"`` is plain Megatron).
        The records have no timelines.

    Raises:
        ValueError: If there is no such file, a line is not a record, or no step of this scenario is in the file.
    """
    given, path = path, Path(path) if Path(path).is_file() else labs_folder() / path
    if not path.is_file():
        raise ValueError(
            f"{given} is not a file: give a file such as results/h200_steps.jsonl in the folder of the labs"
        )
    wanted = _comparable(Scenario.of(architecture, **scenario), has_versions="versions" in scenario)
    found: dict[str, StepRecord] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            values = parse_json(line, "the line", "give a file of measured steps")
            values = values.get("record", values)
            if values["scenario"]["architecture"]["name"] != wanted.architecture.name:
                continue
            record = StepRecord.from_dict(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        is_wanted = _comparable(record.scenario, has_versions="versions" in scenario) == wanted
        if is_wanted and record.status == "ok" and not record.forward_only:
            found.setdefault(f"{record.settings}", record)
    if not found:
        raise ValueError(f"{path} has no step of {wanted}: choose a scenario that was measured")
    return found


def _comparable(scenario: Scenario, *, has_versions: bool) -> Scenario:
    versions = replace(scenario.versions, megatron_core=None) if has_versions else Versions()
    return replace(scenario, seed=0, allocator=AllocatorSettings(), versions=versions)
