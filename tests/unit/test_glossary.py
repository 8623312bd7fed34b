"""The glossary names every word and key that records, settings and tables use, and no text for users is cut off."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from memlab.analysis.diagnosis import Kind
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.record.out_of_memory import Verdict
from memlab.record.step_record import StepRecord
from memlab.record.transfer import GROUPS, Action
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

LABS = Path(__file__).parents[2] / "labs"
GLOSSARY = (LABS / "GLOSSARY.md").read_text()
ENTRIES = [line for line in GLOSSARY.splitlines() if line.startswith("- **")]


def test_no_string_stands_alone_as_the_lost_second_half_of_a_text() -> None:
    lost = []
    for path in (LABS.parent / "memlab").rglob("*.py"):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            value = node.value if isinstance(node, ast.Expr) else None
            is_text = isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and value.value is not ...)
            if is_text and not lines[value.lineno - 1].lstrip().startswith('"""'):
                lost.append(f"{path.name}:{value.lineno}")
    assert lost == []


@pytest.mark.parametrize("key", [*POOLS, *CATEGORIES, *PHASES, *GROUPS, *get_args(Action)])
def test_every_pool_category_phase_group_and_action_is_the_key_of_an_entry(key: str) -> None:
    assert any(f"`{key}`" in entry.partition(":")[0] for entry in ENTRIES)


@pytest.mark.parametrize(
    "name",
    [
        *(field.name for field in fields(StepRecord)),
        *(
            name
            for cls in (Scenario, Layout, TrainingState, AllocatorSettings, MemorySettings)
            for name in options_of(cls)
        ),
    ],
)
def test_every_key_of_a_record_and_every_option_is_in_an_entry(name: str) -> None:
    assert any(f"`{name}`" in entry for entry in ENTRIES)


@pytest.mark.parametrize("word", [*get_args(Kind), *get_args(Verdict)])
def test_every_finding_and_verdict_is_an_entry(word: str) -> None:
    assert any(f"**{word}**" in entry for entry in ENTRIES)


def test_an_entry_is_a_term_and_a_sentence() -> None:
    assert len(ENTRIES) > 60
    for entry in ENTRIES:
        assert re.fullmatch(r"- \*\*[^*]+\*\*.*: .+\.", entry), entry
