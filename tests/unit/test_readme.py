"""What README.md names exists: paths, commands, flags, names of the package and keys of a record."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import memlab
from memlab.cli import build_parser
from memlab.config.architectures import ARCHITECTURES
from memlab.record.step_record import StepRecord

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_path_exists() -> None:
    written = set(
        re.findall(
            r"`((?:memlab|labs|tests|benchmarks|papermill_runs|\.github)/[\w./]*|[\w]+\.(?:md|yml|toml))`", README
        )
    )
    written |= set(re.findall(r"\]\(([\w./]+)\)", README))
    examples = {"labs/NN_name.ipynb"}
    assert [path for path in sorted(written - examples) if not (ROOT / path).exists()] == []
    assert len(written) > 8


def test_the_file_tree_is_the_one_that_is_there() -> None:
    block = re.search(r"```\nmemlab/\n(.*?)```", README, re.DOTALL)
    assert block is not None
    inside, outside = [], []
    for line in block.group(1).splitlines():
        names = [name.strip() for name in re.split(r"\s{2,}", line.strip())[0].split(",")]
        (inside if line.startswith("  ") else outside).extend(names)
    assert [name for name in inside if not (ROOT / "memlab" / name).exists()] == []
    assert [name for name in outside if not (ROOT / name).exists()] == []
    own = {path.name + ("/" if path.is_dir() else "") for path in (ROOT / "memlab").iterdir()}
    assert {name for name in own if not name.startswith("_")} <= set(inside), "a package without a phrase"


@pytest.mark.parametrize(
    "line",
    re.findall(
        r"^memlab (?:measure|predict|search|job|compare|run|nightly|baseline|doctor|lab)\b.*$", README, re.MULTILINE
    ),
)
def test_every_command_parses(line: str) -> None:
    build_parser().parse_args(shlex.split(line)[1:])


def test_make_targets_names_and_keys_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in set(re.findall(r"\bmake (\w+)", README)) if f"\n{name}:" not in makefile] == []
    imported = re.search(r"from memlab import (.*)", README)
    assert imported is not None
    assert [name for name in imported.group(1).split(", ") if name not in memlab.__all__] == []
    keys = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)))
    assert len(keys) > 8
    assert [key for key in keys if key not in StepRecord.__slots__] == []
    assert [name for name in ARCHITECTURES if f"`{name}`" not in README] == []


def test_the_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    small = code.group(1).replace('Lab("qwen3-moe-tiny")', 'Lab("qwen3-moe-tiny", seq_length=32)')
    names: dict[str, object] = {}
    exec(small, names)  # noqa: S102  # the README's own lines
    names["lab"].close()  # type: ignore[attr-defined]
    assert names["full"].peak_allocated_bytes < names["plain"].peak_allocated_bytes  # type: ignore[attr-defined]


def test_the_labs_page_names_every_lab_and_no_other() -> None:
    page = (ROOT / "labs" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+\.ipynb)`", page, re.MULTILINE) == [
        p.name for p in sorted((ROOT / "labs").glob("*.ipynb"))
    ]
