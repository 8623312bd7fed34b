"""What README.md and the pages of the book name exists: paths, commands, flags, names of the package, keys of a record."""

from __future__ import annotations

import argparse
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

import memlab
from memlab.cli import build_parser, main
from memlab.config.architectures import ARCHITECTURES
from memlab.config.option import options_of
from memlab.config.training_state import TrainingState
from memlab.record.step_record import StepRecord
from memlab.regression.suite.notebooks import read_notebook

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "labs" / "book"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "labs" / "SCALING_UP.md", *sorted(BOOK.glob("*.md")))
}
EVERYTHING = "\n".join(PAGES.values())
TP2 = "--tensor-model-parallel-size 2 --world-size 8"
ADAPTERS = (
    "--lora-rank 16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--cross-entropy-loss-fusion"
)
COMMAND = r"memlab (?:measure|predict|search|job|compare|run|nightly|baseline|results|doctor|lab|course)\b"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


@every_page
def test_every_path_exists(page: Path) -> None:
    text = PAGES[page]
    named = re.findall(r"`((?:memlab|labs|tests|benchmarks|papermill_runs|\.github)/[\w./]*)`", text)
    examples = {"labs/NN_name.ipynb", "papermill_runs/suites/mine.yaml"}
    linked = re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", text)
    assert [path for path in named if path not in examples and not (ROOT / path).exists()] == []
    assert [path for path in linked if not (page.parent / path).exists()] == []


def test_the_readme_is_one_screen_that_names_every_how_to_page() -> None:
    assert README.count("\n") < 70
    pages = {path.name for path in PAGES if path.parent == BOOK} - {"contents.md", "api.md"}
    assert pages <= {Path(link).name for link in re.findall(r"\]\(([\w./]+)", README)}


@pytest.mark.parametrize("page", [ROOT / "README.md", BOOK / "how_it_is_built.md"], ids=lambda page: page.stem)
def test_the_file_tree_is_the_one_that_is_there(page: Path) -> None:
    block = re.search(r"```\nmemlab/\n(.*?)```", PAGES[page], re.DOTALL)
    assert block is not None
    inside, outside = [], []
    for line in block.group(1).splitlines():
        names = [name.strip() for name in re.split(r"\s{2,}", line.strip())[0].split(",")]
        (inside if line.startswith("  ") else outside).extend(names)
    assert [name for name in inside if not (ROOT / "memlab" / name).exists()] == []
    assert [name for name in outside if not (ROOT / name).exists()] == []
    own = {path.name + ("/" if path.is_dir() else "") for path in (ROOT / "memlab").iterdir()}
    assert {name for name in own if not name.startswith("_")} <= set(inside), "a package without a phrase"


@pytest.mark.parametrize("line", sorted(set(re.findall(rf"^ *({COMMAND}.*)$", EVERYTHING, re.MULTILINE))))
def test_every_command_parses(line: str) -> None:
    build_parser().parse_args(shlex.split(line.partition(" > ")[0])[1:])


@every_page
def test_every_flag_exists(page: Path) -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    known = {flag for parser in commands.choices.values() for flag in parser._option_string_actions}
    of_others = {"--nproc-per-node", "--gpu-bind", "--ip", "--file", "--fail-on-warning"}
    of_others |= {"--config", "--custom-config-path", "--megatron-config-path"}  # arguments of a job, not of memlab
    inline = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    named = {
        flag
        for code in re.findall(r"`([^`]+)`", inline)
        if not code.startswith(("pip ", "ip", "sbatch", "uvx "))
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code)
    }
    assert named - known - of_others == set()


def test_make_targets_names_and_keys_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in set(re.findall(r"`?\bmake (\w+)`", EVERYTHING)) if f"\n{name}:" not in makefile] == []
    imported = {name for names in re.findall(r"from memlab import (.*)", EVERYTHING) for name in names.split(", ")}
    assert len(imported) > 5
    assert [name for name in imported if name not in memlab.__all__] == []
    table = (BOOK / "live_model.md").read_text().partition("| key of a record |")[2]
    keys = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert len(keys) > 8
    assert [key for key in keys if key not in StepRecord.__slots__] == []
    assert [name for name in ARCHITECTURES if f"`{name}`" not in (BOOK / "commands.md").read_text()] == []


def test_the_section_of_fsdp2_names_each_flag_that_only_fsdp2_has() -> None:
    section = (BOOK / "commands.md").read_text().partition("## FSDP2")[2].partition("\n## ")[0]
    options = options_of(TrainingState).items()
    own = [(name, one) for name, one in options if one.engines == ("fsdp2",)]
    flags = [f"--{'no-' * (one.default is True)}{name.replace('_', '-')}" for name, one in own]
    assert len(flags) > 15
    assert [flag for flag in ("--cp-comm-type", *flags) if flag not in section] == []


def test_the_top_block_says_of_three_commands_what_they_do_and_how_long_they_take() -> None:
    (block,) = re.findall(r"```\n(make .*?)```", README.partition("\n## ")[0], re.DOTALL)
    told = dict(re.findall(r"^make (\w+) +# (.*)$", block, re.MULTILINE))
    assert list(told) == ["run", "lab", "test"] and block.count("\n") == 3
    assert all(re.search(r"\w+; .*\b(seconds|minutes?)\b", text) for text in told.values())


def test_the_examples_run() -> None:
    live, offload = ((BOOK / name).read_text() for name in ("live_model.md", "offload_frees_nothing.md"))
    blocks = [
        *re.findall(r"```python\n(.*?)```", live, re.DOTALL)[:1],
        *re.findall(r"```python\n(.*?)```", offload, re.DOTALL),
    ]
    names: dict[str, object] = {}
    for code in blocks:
        small = code.replace(
            'Lab("qwen3-moe-tiny")', 'lab if "lab" in globals() else Lab("qwen3-moe-tiny", seq_length=32)'
        )
        exec(small, names)  # noqa: S102  # the pages' own lines
    names["lab"].close()  # type: ignore[attr-defined]
    assert names["full"].peak_allocated_bytes < names["plain"].peak_allocated_bytes  # type: ignore[attr-defined]
    assert names["record"].offloaded_bytes_by_module  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "place", "step"),
    [
        ("full_size", r"here ([\d,]+) fit,", f"phi-4 {TP2} --gpu-memory 79GiB --packed-sequences 1"),
        ("adapters", r"Llama 3.1 8B \| 24 GiB \| ([\d,]+) tokens", f"llama-3.1-8b {ADAPTERS} --gpu-memory 24GiB"),
        ("adapters", r"phi-4 \| 48 GiB \| ([\d,]+) tokens", f"phi-4 {ADAPTERS} --gpu-memory 48GiB"),
    ],
)
def test_the_longest_sequence_of_a_page_fits_and_one_with_64_tokens_more_does_not(
    page: str, place: str, step: str
) -> None:
    (tokens,) = re.findall(place, (BOOK / f"{page}.md").read_text())
    longest = int(tokens.replace(",", ""))
    codes = [main(["predict", *step.split(), "--seq-length", f"{each}"]) for each in (longest, longest + 64)]
    assert codes[0] == 0 and codes[1] in (1, 3)


def test_the_book_lists_every_page() -> None:
    listed = re.findall(r"^(?:labs|CON|CHA)[\w/\[\]*-]*$", (BOOK / "contents.md").read_text(), re.MULTILINE)
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "labs").glob("*.md"), *BOOK.glob("*.md")]
    names = {str(path.relative_to(ROOT).with_suffix("")) for path in pages} - {"labs/book/contents"}
    assert set(listed) == names | {"labs/[0-9]*", "labs/teaching/*"}


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^\.\. (?:auto|py:)\w+:: (\w+)$", (BOOK / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(memlab.__all__)


@pytest.mark.parametrize("lab", sorted((ROOT / "labs").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_book_can_show_a_lab(lab: Path) -> None:
    cells = [cell.source for cell in read_notebook(lab).cells if cell.cell_type == "markdown"]
    links = [link for text in cells for link in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", text)]
    assert [link for link in links if not (lab.parent / link).exists()] == []
    levels = [len(marks) for text in cells for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert levels[0] == 1
    assert all(deeper - level <= 1 for level, deeper in pairwise(levels)), "a heading skips a level"


def test_the_labs_page_names_every_lab_and_no_other() -> None:
    page = (ROOT / "labs" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+\.ipynb)`", page, re.MULTILINE) == [
        p.name for p in sorted((ROOT / "labs").glob("*.ipynb"))
    ]
