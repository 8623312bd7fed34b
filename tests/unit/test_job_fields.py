"""Every key of a framework sets a field of memlab, or a name that the readers of jobs read: no value is lost."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.frameworks.registry import FRAMEWORKS

JOBS = Path(__file__).parents[2] / "memlab" / "jobs"
FIELDS = {
    field.name for cls in (Scenario, Layout, TrainingState, MemorySettings, Architecture) for field in fields(cls)
} | {f"lora_{field.name}" for field in fields(LoRA)}


@pytest.fixture(scope="module")
def read() -> tuple[set[str], tuple[str, ...]]:
    """The texts in the readers' code outside the rows of tables, and the endings of those that begin with a variable."""
    texts, endings = set(), []
    for path in [*JOBS.glob("*.py"), *JOBS.glob("frameworks/*.py")]:
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        of_rows = {id(word) for call in calls if ast.unparse(call.func) == "Key" for word in call.args}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in of_rows:
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr) and (found := re.fullmatch(r"f'\{\w+\}(_\w{4,})'", ast.unparse(node))):
                endings.append(found[1])
    return texts, tuple(endings)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_a_key_sets_is_read(name: str, read: tuple[set[str], tuple[str, ...]]) -> None:
    texts, endings = read
    set_by_keys = {key.field for key in FRAMEWORKS[name].keys}
    assert {field for field in set_by_keys - FIELDS - texts if not field.endswith(endings)} == set()


def test_a_name_that_nothing_reads_is_found(read: tuple[set[str], tuple[str, ...]]) -> None:
    texts, endings = read
    assert "engine_share" in texts and "policy_tokens".endswith(endings)
    assert "engine_shares" not in texts and not "engine_shares".endswith(endings)
