"""A launch script is followed without being run: what can be seen is read, everything else is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell_script import read_script


def words_of(text: str, path: Path = Path("run.sh"), **variables: str) -> list[str]:
    """Returns the words of the script's last command."""
    return [word for word, _ in read_script(text, path, variables).commands[-1].words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run $A", [UNKNOWN]),
        ("A=1\nrun $A ${A} '$A' \"$A\"", ["1", "1", "$A", "1"]),
        ("A='x y'\nrun $A \"$A\"", ["x", "y", "x y"]),
        ("run ${N:-8} ${N-9} ${N:+set}", ["8", "9"]),
        ("N=\nrun a${N:-8} b${N-9}", ["a8", "b"]),
        ("N=${M:=4}\nrun $N $M", ["4", "4"]),
        ("A=${B:-${C:-5}}\nrun $A", ["5"]),
        ("run $((2 * (3 + 4) - 7 / 2)) $((-7 / 2)) $((-7 % 2)) $((7 % -3))", ["11", "-3", "-1", "1"]),
        ("N=2\nG=8\nW=$((N * G))\nrun $W $(( $N + ${G} ))", ["16", "10"]),
        ("run $((2 ** 70)) $((1 / 0)) $((x)) $((__import__))", [UNKNOWN] * 4),
        ("run $(rm -rf /) `whoami` $(echo $(nproc)) a$(x)b", [UNKNOWN, UNKNOWN, UNKNOWN, f"a{UNKNOWN}b"]),
        ("A=(1 'b c' # no\n  $((1+1))\n)\nA+=(last)\nrun \"${A[@]}\" ${A[1]} \"${A[*]}\"", ["1", "b c", "2", "last", "b", "c", "1 b c 2 last"]),
        ('A=("--fp8-format hybrid" --bf16 "")\nrun ${A[@]} ${A[*]} "${A[@]}"', ["--fp8-format", "hybrid", "--bf16"] * 2 + ["--fp8-format hybrid", "--bf16", ""]),
        ("run a \\\n  b \\\r\n  c # d\n", ["a", "b", "c"]),
        ("run 'two\nlines' \"a\\\"b\" a\\ b", ["two\nlines", 'a"b', "a b"]),
        ("X=1 Y=2 run $X", ["1"]),
        ("export A=3 B=4\nrun $A$B", ["34"]),
        ("A=x\nA+=y\nrun $A", ["xy"]),
        ("cat <<EOF\nrun no\nEOF\nrun yes > log 2>&1 &", ["yes"]),
        ("run a >/dev/null 2>&1 b", ["a", "b"]),
        ("cmd='run --a 1'\neval $cmd", ["--a", "1"]),
        ("A=8\nif [ $A -gt 4 ]; then B=big; else B=small; fi\nrun $B", ["big"]),
        ("A=1\nif [ $A -gt 4 ]; then B=1; elif [[ $A == 1 ]]; then B=2; else B=3; fi\nrun $B", ["2"]),
        ('B=0\nif [ -z "$UNSET" ]; then B=1; fi\nrun $B', ["1"]),
        ("B=0\nif nvidia-smi; then B=1; fi\nrun $B", ["0"]),
        ("A=y\ncase $A in\n x) B=1 ;;\n y|z) B=2 ;;\n *) B=3\nesac\nrun $B", ["2"]),
        ("[ 2 -gt 1 ] && B=two || B=null\nrun $B", ["two"]),
        ("[ 1 -gt 1 ] && B=two || B=null\nrun $B", ["null"]),
        ("cd /x && run yes || exit 1", ["yes"]),
        ("f() {\n  run inside\n}\n", ["inside"]),
        ("for i in 1 2; do A=$i; done\nrun ${A:-none}", ["none"]),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell_or_unknown(text: str, expected: list[str]) -> None:
    found = words_of(text)
    assert (found[1:] if found[:1] == ["run"] else found) == expected


def test_an_assignment_in_an_undecidable_branch_is_named() -> None:
    script = read_script("if nvidia-smi; then\n  TP=4\nfi\nrun $TP", Path("run.sh"))
    assert script.warnings == [
        "line 2: TP is set in a branch whose condition memlab cannot decide, and is not followed"
    ]


def test_variables_can_be_given_and_sourced_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("MODEL_ARGS=(--num-layers 4)\n")
    text = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "$D/models/tiny.sh"\nrun ${MODEL_ARGS[@]} ${TP:-1}'
    assert words_of(text, tmp_path / "run.sh", TP="2") == ["run", "--num-layers", "4", "2"]
    script = read_script("source other.sh\nrun", tmp_path / "run.sh")
    assert script.warnings == ["line 1: the sourced file other.sh is not there, and is not read"]


def test_a_word_of_an_array_has_the_line_on_which_it_stands() -> None:
    (command,) = read_script("A=(\n --x 1\n --y 2\n)\nrun ${A[@]}", Path("run.sh")).commands
    assert command.words == [("run", 5), ("--x", 2), ("1", 2), ("--y", 3), ("2", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nrun 'open\n", "run.sh, line 2: the quote ' is not closed: add '"),
        ("run\nA=(1 2\n", "run.sh, line 2: the array's '(' is not closed: add ')'"),
    ],
)
def test_what_is_not_closed_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_script(text, Path("run.sh"))
    assert str(error.value) == message


HOSTILE = {
    "doubling": "A=aaaaaaaaaa\n" + "A=$A$A\n" * 100 + "run $A",
    "doubling array": "A=(a b c d)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + "run ${A[@]}",
    "self": "A=$A$A$A\nrun $A",
    "deep": "run " + "${A:-" * 5000 + "}" * 5000,
    "arithmetic": "run $((" + "(" * 5000 + "1" + ")" * 5000 + "))",
    "power": "A=9999999999\n" + "A=$((A * A))\n" * 50 + "run $A",
    "dollars": "run " + "$" * 100_000,
    "braces": "run " + "${" * 20_000,
    "quotes": "run " + "'a'" * 50_000,
    "continuations": "run \\\n" * 50_000,
    "blocks": "if [ 1 = 1 ]; then\n" * 5000,
    "sources": "source run.sh\n" * 50,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_script_ends_soon(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(HOSTILE[name])
    try:
        read_script(HOSTILE[name], path)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = (
        f"touch {mark}\nA=$(touch {mark})\nB=`touch {mark}`\neval touch {mark}\n: ${{C:=$(touch {mark})}}\nrun $A $B $C"
    )
    words_of(text, tmp_path / "run.sh")
    assert not mark.exists()
