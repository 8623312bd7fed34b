"""The glossary names every word and key that records, settings and tables use."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from memlab.analysis.diagnosis import Kind
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.record.out_of_memory import Verdict
from memlab.record.step_record import StepRecord
from memlab.record.transfer import GROUPS, Action
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

LABS = Path(__file__).parents[2] / "labs"
GLOSSARY = (LABS / "GLOSSARY.md").read_text()
ENTRIES = [line for line in GLOSSARY.splitlines() if line.startswith("- **")]


@pytest.mark.parametrize("key", [*POOLS, *CATEGORIES, *PHASES, *GROUPS, *get_args(Action)])
def test_every_pool_category_phase_group_and_action_is_the_key_of_an_entry(key: str) -> None:
    assert any(f"`{key}`" in entry.partition(":")[0] for entry in ENTRIES)


@pytest.mark.parametrize(
    "name", [field.name for kind in (StepRecord, MemorySettings, TrainingState) for field in fields(kind)]
)
def test_every_key_of_a_record_of_settings_and_of_a_training_state_is_in_an_entry(name: str) -> None:
    assert any(f"`{name}`" in entry for entry in ENTRIES)


@pytest.mark.parametrize("word", [*get_args(Kind), *get_args(Verdict)])
def test_every_finding_and_verdict_is_an_entry(word: str) -> None:
    assert any(f"**{word}**" in entry for entry in ENTRIES)


def test_an_entry_is_a_term_and_a_sentence() -> None:
    assert len(ENTRIES) > 60
    for entry in ENTRIES:
        assert re.fullmatch(r"- \*\*[^*]+\*\*.*: .+\.", entry), entry
