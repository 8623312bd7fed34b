"""`memlab course`: students get no answers, a check that grades, slides of every section, and plans that name what is there."""

from __future__ import annotations

import html
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from traitlets.config import Config

from memlab.cli import main
from memlab.commands.course import _NBGRADER
from memlab.course.notebooks import solved_notebook, student_notebook
from memlab.course.slides import slides_of
from memlab.regression.suite.notebooks import read_notebook
from tests.notebooks.in_process import cells_in_this_process
from tests.notebooks.small_labs import write_lab

ROOT = Path(__file__).parents[2]
LABS = sorted((ROOT / "labs").glob("*.ipynb"))
every_lab = pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)


@every_lab
def test_students_get_the_exercises_without_their_answers(path: Path) -> None:
    lab = read_notebook(path)
    exercises = [cell for cell in lab.cells if "exercise" in cell.metadata.get("tags", [])]
    student, solved = student_notebook(lab, "memlab"), solved_notebook(lab)
    nbformat.validate(student)
    text = "\n".join(cell.source for cell in student.cells)
    assert not re.search(r"Answers?</strong> to the (exercise|task)", text)
    assert text.count("## Your turn\n\nEach exercise has two cells") == bool(exercises)
    assert "<details open>" in "\n".join(cell.source for cell in solved.cells)
    graded = [cell.metadata.nbgrader for cell in student.cells if "nbgrader" in cell.metadata]
    assert [(each.solution, each.grade) for each in graded] == [(True, False), (False, True)] * len(exercises)
    assert sum(each.get("points", 0) for each in graded) == len(exercises)
    assert len({each.grade_id for each in graded}) == len(graded)
    answers = [cell.source for cell in student.cells if cell.metadata.get("nbgrader", {}).get("solution")]
    assert all(source.count("# change me") == 1 and "check(" not in source for source in answers)
    assert "nbgrader" not in str(lab), "the lab itself is as it was"


@pytest.mark.parametrize(("answer", "passes"), [("mine = 3", True), ("mine = 2", False)])
def test_a_check_of_a_student_fails_where_a_goal_is_missed(answer: str, passes: bool) -> None:
    source = "mine = 0  # change me\n# the number of bytes\ncheck(mine).is_exactly(\n    3, 'count them'\n)"
    exercise = nbformat.v4.new_code_cell(source, metadata={"tags": ["interactive-only", "exercise"]})
    _, cell, check = student_notebook(nbformat.v4.new_notebook(cells=[exercise]), "memlab").cells
    assert cell.source == "mine = 0  # change me\n# the number of bytes"
    lines = f"from memlab import check\n{answer}\n{check.source}"
    if passes:
        exec(lines)  # noqa: S102  # the cells above
    else:
        with pytest.raises(AssertionError, match="a goal is missed: the line printed above says how"):
            exec(lines)  # noqa: S102


@pytest.mark.parametrize("judged", [3, 4])
def test_a_check_of_a_student_forgets_the_answer_that_it_has_judged(
    judged: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer with a syntax error does not run at all, not even its line that forgets an older one."""
    lines = [
        "mine = None  # forget an older answer",
        "mine = 0  # change me",
        "check(mine).is_exactly(3, 'count them')",
    ]
    exercise = nbformat.v4.new_code_cell("\n".join(lines), metadata={"tags": ["exercise"]})
    *_, check = student_notebook(nbformat.v4.new_notebook(cells=[exercise]), "memlab").cells
    names: dict[str, object] = {}
    with pytest.raises(AssertionError) if judged != 3 else nullcontext():
        exec(f"from memlab import check\nmine = {judged}\n{check.source}", names)  # noqa: S102  # the cells above
    with pytest.raises(AssertionError):
        exec(check.source, names)  # noqa: S102
    line = "got an answer that was checked already, must get one number per case. Hint: run the answer's cell again"
    assert line in capsys.readouterr().out


@every_lab
def test_every_check_of_a_student_forgets_what_it_judges(path: Path) -> None:
    for cell in student_notebook(read_notebook(path), None).cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            judged = re.findall(r"\bcheck\(\(?([\w, ]+)\)", cell.source)  # as in check(mine) and check((release, load))
            names = [name for text in judged for name in text.split(", ")]
            assert re.findall(r"(?m)^(\w+) = \"checked already\"", cell.source) == names


def test_only_colab_installs_memlab(monkeypatch: pytest.MonkeyPatch) -> None:
    install, *_ = student_notebook(nbformat.v4.new_notebook(), "https://example.org/memlab.whl").cells
    shell = MagicMock()
    code = compile(TransformerManager().transform_cell(install.source), "install", "exec")
    exec(code, {"get_ipython": lambda: shell})  # noqa: S102  # the lab's own cell
    assert shell.mock_calls == []
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    exec(code, {"get_ipython": lambda: shell})  # noqa: S102
    (call,) = shell.run_line_magic.call_args_list
    assert call.args[0] == "pip" and call.args[1].endswith(
        "https://download.pytorch.org/whl/cpu 'https://example.org/memlab.whl'"
    )


def test_nbgrader_is_told_to_keep_the_lines_that_students_change() -> None:
    config = Config()
    exec(_NBGRADER, {"get_config": lambda: config})  # noqa: S102  # the file that nbgrader runs
    assert config.ClearSolutions.enabled is False and config.CourseDirectory.source_directory == "."


@pytest.mark.parametrize(
    ("name", "about_the_notebook"),
    [
        ("00_quickstart", ["Record"]),  # "Parameters" is also a part of another heading
        ("02_recompute", ["Parameters", "Preparation for the last exercise", "Record"]),
    ],
)
def test_slides_have_a_lab_s_sections_and_figures_and_no_code(name: str, about_the_notebook: list[str]) -> None:
    lab = read_notebook(ROOT / "labs" / f"{name}.ipynb")
    step = next(cell for cell in lab.cells if "\nlab = Lab(" in cell.source)
    figure = {"application/vnd.plotly.v1+json": {"data": [], "layout": {"title": "a figure"}}, "text/plain": "its text"}
    printed = "By how much?\n  result: 3 GiB (you entered no guess)\n2 of 3 fit\n"
    revealed = nbformat.v4.new_output("stream", text=printed)
    step.outputs = [nbformat.v4.new_output("display_data", data=figure), revealed]
    page = slides_of(lab)
    assert "By how much?" not in page and "result: 3 GiB" not in page and "entered no guess" not in page
    of_figure, of_print = (
        re.search(rf"<section>(?:(?!<section>).)*{text}", page, re.DOTALL) for text in ("a figure", "2 of 3 fit")
    )
    assert of_figure and of_print and of_figure.start() != of_print.start(), "each output has a slide of its own"
    headings = re.findall(
        r"(?m)^## (.*)$", "\n".join(cell.source for cell in lab.cells if cell.cell_type == "markdown")
    )
    shown = re.sub("<[^>]*>", "", page)
    missing = [name for name in headings if name.replace("`", "") not in shown]
    assert missing == about_the_notebook
    assert "a figure" in page and '<script src="plotly.min.js"></script></head>' in page
    assert "to the exercises" not in page and "lab.step(" not in page


def test_a_table_comes_before_the_text_that_stands_after_it_and_printed_lines_share_a_slide() -> None:
    text = "## Cost\n\nFLOPs per token:\n\n| mlp |\n| --- |\n| 6hf |\n\nThe last column is a ratio.\n\n| moe |\n| --- |\n| 2hE |"
    printed = [nbformat.v4.new_output("stream", text=line) for line in ("plain: 18\n", "aware: 16\n")]
    cells = [nbformat.v4.new_code_cell("", metadata={"tags": ["parameters"]}), nbformat.v4.new_markdown_cell(text)]
    cells.append(nbformat.v4.new_code_cell(outputs=printed))
    page = slides_of(nbformat.v4.new_notebook(cells=cells)).partition('class="slides"')[2]
    slides = [html.unescape(re.sub("<[^>]*>", "", each)) for each in re.split("<section>", page)]
    of = {
        part: next(place for place, each in enumerate(slides) if part in each)
        for part in ("Cost", "6hf", "ratio", "2hE")
    }
    assert of["Cost"] == of["6hf"] < of["ratio"] < of["2hE"]
    assert any("plain: 18\naware: 16" in each for each in slides)


def test_a_slide_has_whole_paragraphs() -> None:
    """A sentence left out can be the one to which the next refers: *it* and *the first* here."""
    texts = [
        "## Half\n\nThe next cell recomputes one part. It is the first of two.",
        "**Look at** it. In the next cell, it grows.",
    ]
    run_it = "## Quiz\n\nRun the next cells, choose an answer, and click it. Their code is hidden, because it contains the answers."
    guess = "## Guess\n\nEnter your guesses in the fields below. phi-4 has 40 layers."
    cells = [nbformat.v4.new_markdown_cell(text) for text in (texts[0], run_it, guess)]
    cells[1:1] = [
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text="3 GiB")]),
        nbformat.v4.new_markdown_cell(texts[1]),
    ]
    parameters = nbformat.v4.new_code_cell("", metadata={"tags": ["parameters"]})
    shown = re.sub("<[^>]*>", "", slides_of(nbformat.v4.new_notebook(cells=[parameters, *cells])))
    assert "The next cell recomputes one part. It is the first of two." in shown
    assert "Look at it. In the next cell, it grows." in shown
    assert "phi-4 has 40 layers." in shown and "fields below" not in shown and "choose an answer" not in shown


def test_a_table_is_a_slide_of_its_own_and_a_folded_one_is_left_out() -> None:
    text = "## Results\n\nLook at these columns. One is of your job (simulated):\n\n| peak | start |\n| --- | --- |\n| high | low |"
    text += "\n\n<details><summary>more</summary>\n\n| folded | |\n| --- | --- |\n\n</details>"
    cells = [nbformat.v4.new_code_cell("", metadata={"tags": ["parameters"]}), nbformat.v4.new_markdown_cell(text)]
    page = slides_of(nbformat.v4.new_notebook(cells=cells))
    assert re.findall("<t[hd][^>]*>([^<]*)</t[hd]>", page) == ["peak", "start", "high", "low"]
    *_, of_table = page.partition("<table")[0].split("<section")
    announcement = "Look at these columns. One is of your job (simulated):"
    assert announcement in of_table
    assert page.count(announcement) == 1, "only its own slide has the paragraph"
    assert re.search(r"section \{[^}]*max-height: 700px; overflow-y: auto", page), "a tall slide scrolls"


@every_lab
def test_every_lab_has_slides_with_the_questions_that_it_asks(path: Path) -> None:
    lab = read_notebook(path)
    shown = html.unescape(slides_of(lab))
    headings = [cell.source for cell in lab.cells if re.match("## Parameters.", cell.source)]
    assert all(heading.partition("\n")[0].removeprefix("## ") in shown for heading in headings), (
        "not the notebook's own"
    )
    asked = [text for cell in lab.cells for text in re.findall(r'\b(?:guess|quiz)\(\s*f?"([^"{]+)', cell.source)]
    assert [text for text in asked if re.sub("[`*]", "", text) not in re.sub("<[^>]*>", "", shown)] == []


def test_a_question_on_a_slide_has_the_values_of_what_it_names() -> None:
    cells = [
        nbformat.v4.new_code_cell("num_ranks: int = 2  # ranks", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell('micro = 4\nguess(f"With {micro * num_ranks} micro-batches?", "MiB")'),
    ]
    assert "With 8 micro-batches? (MiB)" in slides_of(nbformat.v4.new_notebook(cells=cells))
    cells[1].source = 'micro = len(record)\nguess(f"With {micro} micro-batches?", "MiB")'
    with pytest.raises(ValueError, match="the slides cannot ask this, because name 'micro' is not defined"):
        slides_of(nbformat.v4.new_notebook(cells=cells))


def test_slides_without_figures_ask_the_questions_and_point_at_nothing_that_is_not_there() -> None:
    page = slides_of(read_notebook(ROOT / "labs" / "03_activation_offload.ipynb"))
    shown = html.unescape(re.sub("<[^>]*>", "", page.partition('class="slides"')[2]))
    assert "In how many of the layers are a module's tensors offloaded? (of 4)" in shown
    assert "Why was offload still right?" in shown and "It made room for a faster layout" in shown
    assert "larger matrices and exchanges less" not in shown, "why an answer is right"
    assert "<strong>Look at</strong>" not in page
    slides = re.findall(r"<section>(.*?)</section>", page, flags=re.DOTALL)
    assert [text for text in slides if "<h2" in text and "<p>" not in text and "<table" not in text] == []
    assert not re.search("fields below|code is hidden", shown), "nobody can enter or run anything on a slide"
    text = "## The sum\n\nTogether they are\n\n    8h bytes\n\nper token.\n\n**Look at** the bars."
    parameters = nbformat.v4.new_code_cell("", metadata={"tags": ["parameters"]})
    page = slides_of(nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_markdown_cell(text)]))
    assert "8h bytes" in page and "per token." in page and "the bars" not in page


@cells_in_this_process()
def test_the_course_of_a_small_folder_of_labs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    labs = tmp_path / "labs"
    (labs / "teaching").mkdir(parents=True)
    for name in ("results", "book"):
        (labs / name).mkdir()
    for name in ("GLOSSARY", "teaching/README"):
        (labs / f"{name}.md").write_text(name)
    write_lab(labs, "print(1)", name="01_small")
    write_lab(labs, "1 / 0", name="02_broken")
    monkeypatch.setattr("memlab.commands.course.labs_folder", lambda: labs)
    course = tmp_path / "course"
    assert main(["course", str(course), "--run", "--install", "https://example.org/memlab.whl"]) == 1
    said, complaint = capfd.readouterr()
    assert said.endswith(f"the course is in {course}: begin with README.md\n")
    assert complaint.startswith("02_broken.ipynb failed ") and complaint.endswith("so its slides have text only\n")
    assert (course / "runs" / "01_small" / "notebook.ipynb").is_file()
    assert "A small lab" in (course / "slides" / "02_broken.slides.html").read_text(), "its title is all that it says"
    assert {path.name for path in course.iterdir()} == {
        "README.md",
        "student",
        "solutions",
        "slides",
        "binder",
        "runs",
        "nbgrader_config.py",
    }
    assert not [
        path for of in ("student", "solutions") for path in (course / of).rglob("*") if "teaching" in path.parts
    ]
    wanted = "--extra-index-url https://download.pytorch.org/whl/cpu\nhttps://example.org/memlab.whl\n"
    assert (course / "binder" / "requirements.txt").read_text() == wanted
    assert "https://example.org/memlab.whl" in read_notebook(course / "student" / "01_small.ipynb").cells[0].source
    (labs / "02_broken.ipynb").unlink()
    assert main(["course", str(tmp_path / "other")]) == 0
    assert not (tmp_path / "other" / "binder").exists()
    assert "parameters" in read_notebook(tmp_path / "other" / "student" / "01_small.ipynb").cells[1].metadata.tags
    assert main(["course", str(course)]) == 2
    assert "which is not empty, must be a new or an empty folder" in capfd.readouterr().err


def test_a_course_has_the_files_to_which_its_pages_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labs = tmp_path / "labs"
    shutil.copytree(ROOT / "labs", labs, ignore=shutil.ignore_patterns("*.ipynb", "*.jsonl"))
    monkeypatch.setattr("memlab.commands.course.labs_folder", lambda: labs)
    assert main(["course", str(tmp_path / "course")]) == 0
    assert not list((tmp_path / "course" / "student").rglob("lecture_*")), (
        "plans tell outcomes, and which answer is right"
    )
    log, of_teacher = ((tmp_path / "course" / of / "LOG.md").read_text() for of in ("student", "solutions"))
    assert "xercise 2 of lab" in of_teacher and "xercise 2 of lab" not in log, "the log tells answers"
    pages = sorted((tmp_path / "course").glob("s*/**/*.md"))
    links = {page: re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text()) for page in pages}
    assert sum(map(len, links.values())) > 20
    assert not [(page, link) for page, of in links.items() for link in of if not _exists(page.parent / link)]


@pytest.mark.parametrize("command", [["course"], ["lab", "--copy-to"]], ids=" ".join)
def test_labs_are_not_copied_into_themselves(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "labs" / "book" / "mine"
    inside.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memlab.commands.course.labs_folder", lambda: tmp_path / "labs")
    assert main([*command, str(inside)]) == 2
    assert "must be outside what is copied" in capfd.readouterr().err and not inside.exists()


def _exists(link: Path) -> bool:
    return link.exists() or link.suffix in (".ipynb", ".jsonl")


def test_the_plans_name_exercises_that_there_are() -> None:
    for plan in sorted((ROOT / "labs" / "teaching").glob("lecture_*.md")):
        for row in re.findall(r"(?m)^\| \d.*$", plan.read_text()):
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            for number in re.findall(r"\blabs? (\d\d)|^(\d\d)$", cells[1] if len(cells) == 4 else cells[2]):
                assert [path for path in LABS if path.stem.startswith("".join(number))]
            if len(cells) == 4 and re.fullmatch(r"\d\d", cells[1]):
                (lab,) = (path for path in LABS if path.stem.startswith(cells[1]))
                count = sum("exercise" in cell.metadata.get("tags", []) for cell in read_notebook(lab).cells)
                assert all(int(number) <= count for number in re.findall(r"\d", cells[3])), row
