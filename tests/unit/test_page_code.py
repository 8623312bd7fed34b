"""The panel's JavaScript and CSS: linted, run under node with the page as a stub, and without dead rules."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tinycss2
from playwright._impl._driver import compute_driver_executable

from memlab.config.settings import MemorySettings
from memlab.views.panel.static_files import STATIC, page_code

ROOT = Path(__file__).parents[2]
PANEL = ROOT / "memlab" / "views" / "panel"
SCRIPTS = Path(__file__).parent / "page_code"
NODE, _ = compute_driver_executable()  # playwright's wheel has a node of its own: pip is all that a machine needs


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_javascript_passes_the_linter() -> None:
    assert run(Path(sys.executable).with_name("oxlint"), "--deny-warnings", STATIC, SCRIPTS) == ""


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.mjs")), ids=lambda path: path.stem)
def test_javascript_keeps_its_rules(script: Path) -> None:
    assert run(NODE, "--no-warnings", "--test", script) == ""


def test_css_has_no_part_that_a_browser_would_skip() -> None:
    rules = tinycss2.parse_stylesheet(page_code("panel.css"), skip_comments=True, skip_whitespace=True)

    assert [rule for rule in rules if rule.type == "error"] == []
    assert [
        part.message for rule in rules for part in tinycss2.parse_blocks_contents(rule.content) if part.type == "error"
    ] == []


def test_css_styles_only_classes_that_the_panel_gives() -> None:
    styled = set(re.findall(r"\.memlab-([\w-]+)", page_code("panel.css")))
    code = "".join(path.read_text(encoding="utf-8") for path in [*PANEL.glob("*.py"), *STATIC.glob("*.js")])
    given = {name for name in styled if re.search(rf"""["'{{-]{name}["' ]|memlab-{name}\b""", code)}
    of_controls = {field.name.replace("_", "-") for field in fields(MemorySettings)}  # each with its note

    assert styled - given - of_controls - {f"note-{name}" for name in of_controls} == set()
