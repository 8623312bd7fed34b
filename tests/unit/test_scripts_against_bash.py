"""For random valid scripts, memlab reads the arguments with which bash starts the job, or says that it cannot tell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from memlab.jobs.entries import UNKNOWN, UNKNOWN_WORDS
from memlab.jobs.job import Job
from memlab.jobs.shell.script import read_script
from tests.unit.shell_scripts import ScriptMaker, compared, starts_of_bash

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the truth is bash, which is not installed")


@pytest.mark.parametrize(
    "seed", [*range(0, 100, 20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 200, 20))]
)
def test_a_random_script_starts_what_bash_starts_or_is_said_to_be_undecided(seed: int, tmp_path: Path) -> None:
    path, found = tmp_path / "run.sh", []
    for each in range(seed, seed + 20):
        maker = ScriptMaker(each)
        text, arguments = maker.script(), maker.arguments()
        path.write_text(text)
        try:
            starts = starts_of_bash(path, tmp_path, arguments)
        except subprocess.TimeoutExpired:  # a loop without an end
            continue
        try:
            script = read_script(text, path, arguments=arguments)
        except ValueError:  # refused, in words: as a loop of which bash still reached the end in its time
            continue
        found.append(compared(script, starts))
        assert found[-1] != "wrong", f"seed {each}:\n{text}\nbash: {starts}"
    assert found.count("equal") >= 10


REFUSED = [
    *(
        "x=<V>\nls",
        "a <b>",
        "ls >",
        "cat <",
        "ls 2>",
        "if ls; then ls",
        "for i in 1; do ls",
        "while ls; do ls; fi",
        "fi",
    ),
    *("f() { ls", "(ls", "ls)", "}", "do", "done", "esac", "case x in a) ls;;", "f ( a b )", "if ls\nfi", "ls ;; ls"),
    *("ls &&", "&& ls", "ls | | ls", "ls & & ls", "ls |"),
]
ACCEPTED = [
    *(
        "echo fi done }",
        "ls 2>&1 >&2 <<<x",
        "cat <<E\nx <b>\nE",
        "exec 3<>f",
        "echo a >& f",
        "[[ a < b ]]",
        "! true | false",
    ),
    *(
        "[[ a =~ (b|c) ]] && ls",
        "case x in (a|b) ls;; *) ls;; esac",
        "time ls",
        "f() (ls)",
        "function f { ls; }",
        "ls &",
    ),
    *(
        "if ((1>0)); then ls; fi",
        "((1<2)) && ls",
        "x=$((1<2))",
        "diff <(ls) >(cat)",
        "cat < <(ls)",
        "ls > $(echo b)",
        "{ ls; }",
    ),
    *("for ((i=0;i<3;i++)); do ls; done", "select x in a; do break; done", "coproc ls", "ls &&\n\n# c\nls", "a=(1\n2)"),
]


@pytest.mark.parametrize("text", [*REFUSED, *ACCEPTED])
def test_a_script_that_bash_refuses_is_said_to_end_there(text: str, tmp_path: Path) -> None:
    bash = subprocess.run(["bash", "-n", "-c", text], check=False, capture_output=True)  # noqa: S607
    is_refused = bash.returncode != 0
    assert is_refused == (text in REFUSED)
    causes = read_script(f"{text}\n", tmp_path / "run.sh").causes
    assert any("bash ends the script here with a syntax error" in cause for cause in causes) == is_refused


CERTAIN = {
    "a reference to a variable of the caller": (
        'add() { local -n out=$1; shift; out+=("$@"); }\nARGS=(--tp 1)\nadd ARGS --tp 4 --sequence-parallel\ntorchrun "${ARGS[@]}"'
    ),
    "a reference to a scalar": "declare -n ref=TP\nTP=1\nref=4\nref+=0\nunset -n ref\ntorchrun $TP",
    "shift in a loop": 'start() { while [ "$1" != "--" ]; do shift; done; shift; torchrun "$@"; }\nstart node1 --pp 2 -- --tp 4',
    "defaults of arguments": "launch() { torchrun ${1-4} ${2-2} ${3:-3} ${4+x}; }\nlaunch 2",
    "a slice whose start is an expansion": "M=qwen3-30b\ntorchrun ${M:${N:-0}:5} ${M: -3} ${M:1?2:3:2} ${M:(-4):2}",
    "braces beside quotes": 'TP=4\ntorchrun x{1,2}"$TP" {"a b",c}{1,2} "{a,b}"{1,2} {a,b\\,c} {,x}y ${TP}{1,2}',
    "braces with steps and letters": "torchrun {1..9..3} {9..1..-4} {a..c} {c..a..2} {01..10..5} {-1..1} {1..2}{a..b} {a..3} {1..}",
    "braces come before variables": "A1=x A2=y A=z\ntorchrun $A{1,2} ${A}{1,2}",
    "declared numbers and letters": "declare -i N=2*3\nN+=4\nN=N*2\ndeclare -l L=AbC\nL+=D\ndeclare -u U\nU=abc\ntorchrun $N $L $U",
    "local declarations end": 'declare -i N=1\nf() { local -u N=a; torchrun $N; }\nf\nN+=1\ntorchrun $N "${N}"',
    "lastpipe": "shopt -s lastpipe\nprintf '%s\\n' 2 8 | while read -r x; do A+=($x); done\ntorchrun ${A[@]}",
    "without lastpipe": "A=(1)\nprintf '%s\\n' 2 8 | while read -r x; do A+=($x); done\ntorchrun ${A[@]}",
    "IFS": 'L=a,b,,c\nIFS=,\nA=($L)\ntorchrun "${A[*]}" $L\nunset IFS\ntorchrun "${A[@]}" "${#A[@]}"',
    "read with IFS": "IFS=: read -r a b c <<< 'x:y z:w:v'\nIFS=, read -ra l <<< '1,2, 3'\ntorchrun \"$a\" \"$b\" \"$c\" \"${l[@]}\"",
    "a here-document": "TP=4\nread -r -d '' TEXT <<EOF\n--tp $TP \"q\" \\$x\nEOF\ntorchrun $TEXT",
    "a literal here-document": "while IFS= read -r line; do torchrun \"$line\"; done <<'EOF'\n a $TP\\\nb\nEOF",
    "mapfile": "mapfile -t A < <(printf '%s\\n' a 'b c')\nreadarray B <<< x\ntorchrun \"${A[@]}\" \"${B[@]}\"",
    "a map": 'declare -A M=([7b]=2 ["a b"]=3)\nM[30b]=4\nK=30b\ntorchrun ${M[$K]} ${M[7b]} "${M[a b]}" ${#M[@]} ${M[none]-none}',
    "an array with gaps": 'A=([2]=c [0]=a b)\nA[7]=h\nunset "A[0]"\ntorchrun "${A[@]}" ${!A[@]} ${#A[@]} ${A[-1]} ${A[@]: -2:1}',
    "patterns": "F=a/b.c.yaml\ntorchrun ${F##*/} ${F%.*} ${F%%.*} ${F#*[!a]} ${F/b?c/x} ${F//[ab]} ${F/#a/z} ${F/%yaml/sh} ${F^^[a-c]} ${F@Q}",
    "extended patterns": "shopt -s extglob\nV=aab12\ntorchrun ${V%%+([0-9])} ${V##*(a)}\ncase $V in @(x|aab)*) torchrun yes;; esac",
    "classes": "[[ qwen3 == *[[:digit:]] ]] && A=1\n[[ q == [^[:upper:]] ]] && B=2\ntorchrun $A $B",
    "regular expressions": 'M=qwen3-30b\n[[ $M =~ ^qwen([0-9]+)-([0-9]+)b$ ]] && torchrun ${BASH_REMATCH[1]} ${BASH_REMATCH[2]}\n[[ $M =~ "3." ]] || torchrun no',
    "arithmetic": "A=5\ntorchrun $((A<<2|1)) $((16#ff)) $((010)) $((++A)) $A $((A>5?A:0)) $((1,2)) $((2**3**2)) $((-2**2)) $((!A)) $((~A)) $((A%=4)) $((7^2)) $((2**70))",
    "arithmetic of variables": "X='Y+1' Y=3\ntorchrun $((X*2))\n((A[2]=5, N=A[2]*2))\ntorchrun $N ${A[2]}",
    "loops of numbers": "for ((i = 0; i < 6; i += 2)); do (( i == 2 )) && continue; A+=($i); done\nuntil (( i <= 4 )); do ((i--)); done\ntorchrun ${A[@]} $i",
    "loops that are left": "for i in 1 2 3; do for j in a b; do [ $i$j = 2a ] && break 2; A+=($i$j); done; done\nwhile :; do N+=x; [ $N = xxx ] && break; done\ntorchrun ${A[@]} $N",
    "getopts": "f() { local OPTIND o; while getopts 'ab:' o; do case $o in a) A=1;; b) B=$OPTARG;; esac; done; shift $((OPTIND - 1)); torchrun $A $B \"$@\"; }\nf -ab 7 'x y' -a",
    "what builtins print": "f() { printf '%s-' \"$@\"; }\ntorchrun $(echo a 'b  c') \"$(f 1 2)\" $(printf '%03d' 7) $(for i in 1 2; do echo $i; done) `echo \\$#` \"$(echo 'x\n\n')\"",
    "exit codes": "f() { return 3; }\nf\nA=$?\n(exit 4)\nB=$?\n[ 1 = 2 ]\nC=$?\n! true\nD=$?\nX=$(exit 5)\ntorchrun $A $B $C $D $?",
    "set -e": "set -e\nf() { [ a = b ]; }\nf || A=1\nif ! f; then B=2; fi\n[ a = b ] && C=3\ntorchrun $A $B ${C-none}",
    "options of set in any order": 'set -eou pipefail\nset +o errexit -u\ntorchrun "$@" $#\nset -x -- a\ntorchrun "$@"',
    "a calculation in what is printed": "N=1\ntorchrun $(echo $((N += 1))) $N",
    "an exit trap": "trap 'torchrun last' EXIT\ntorchrun first",
    "functions that change": "f() { torchrun 1; }\nf\nf() { torchrun 2; }\nf\n(f() { torchrun 3; }; f)\nf\ncommand torchrun 4",
    "options of the shell": "shopt -s nocasematch\n[[ ABC == abc ]] && torchrun folded\nshopt -u nocasematch\n[[ ABC == abc ]] || torchrun exact\nset -f\ntorchrun *.x",
}  # fmt: skip


@pytest.mark.parametrize("text", CERTAIN.values(), ids=CERTAIN)
def test_a_construct_is_read_as_bash_has_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    script = read_script(text, path, arguments=[])
    starts = starts_of_bash(path, tmp_path)
    assert starts
    assert [[word for word, _ in one.words[1:]] for one in script.commands] == starts
    assert not script.warnings
    assert all(one.is_certain for one in script.commands)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("if nvidia-smi; then layout() { TP=2; }; else layout() { TP=8; }; fi\nlayout\ntorchrun $TP", [UNKNOWN_WORDS]),
        ("TP=1\nf() { nvidia-smi || return; TP=8; }\nf\ntorchrun $TP", ["1"]),
        ("TP=1\nfor i in 1 2; do nvidia-smi && break; TP=$i; done\ntorchrun $TP", ["1"]),
        ("set -- 2 8\nnvidia-smi > /dev/null || shift\ntorchrun $1", ["2"]),
        ("set -- 2 8\nnvidia-smi && set -- 4\ntorchrun $1", ["2"]),
        ("select TP in 2 4; do break; done\ntorchrun $TP", [UNKNOWN_WORDS]),
        ("TP=1\nwhile ! nvidia-smi; do TP=2; done\ntorchrun $TP", ["1"]),
        ("f() { local -n g=$1; g=2; }\nlocal_name=1\nf g\ntorchrun $g", [UNKNOWN_WORDS]),
        ("readonly TP=2\nTP=4\ntorchrun $TP", ["2"]),
        ("declare -A M\nM[$X]=1\ntorchrun ${M[a]}", [UNKNOWN_WORDS]),
    ],
)  # fmt: skip
def test_what_cannot_be_decided_is_said(text: str, words: list[str]) -> None:
    script = read_script(text, Path("run.sh"))
    assert [UNKNOWN_WORDS if word == UNKNOWN else word for word, _ in script.commands[-1].words[1:]] == words
    assert script.warnings or words == [UNKNOWN_WORDS]
    assert all(warning.startswith("line ") for warning in script.warnings)


@pytest.mark.parametrize(
    "text",
    [
        *("V=1\njob", "export V=1\njob", "V=1; export V\njob", "export V; V=1\njob", "V=1 job", "V=0\nV=1 job"),
        *("declare -x V=1\njob", "declare V=1\njob", "typeset -x V\nV=1\njob", "export V=1\nexport -n V\njob"),
        *("export V=1\ndeclare +x V\njob", "set -a\nV=1\nset +a\njob", "set -o allexport\nV=1\njob"),
        *("export V=1\nenv -u V job", "export V=1\nenv -i job", "env V=1 job", "export V=1\nenv --unset V W=2 job"),
        *("export V=1\nV=2\njob", "export V=1\nunset V\njob", "N=V; export $N=1\njob", "f() { local -x V=1; job; }\nf"),
        *("V=1\nbash -c job", "export V=1\nbash -c job", "V=1 bash -c job", "f() { job; }\nV=1 f", "readonly V=1\njob"),
        *(
            "V=1\nfor W in V; do export $W; done\njob",
            "V=1\n(export V; job)",
            "export $(echo V=1)\njob",
            "V=1 exec job",
        ),
        *("(export V=1)\nV=2\njob", "f() { :; }\nV=1 f\nV=2\njob", "export V=1\nunset V\nV=2\njob"),
        *("f() { local -x V=1; }\nf\nV=2\njob", "f() { (:); export V=1; }\nf\njob", "export V | cat\nV=2\njob"),
    ],
)
def test_a_program_has_the_variables_that_bash_exports(text: str, tmp_path: Path) -> None:
    stub = tmp_path / "job"
    stub.write_text('#!/bin/sh\nprintf "%s" "${V-none}"\n')
    stub.chmod(0o755)
    text = text.replace("job", f"{stub} --flag x.py")  # by its path, since env -i has no PATH
    text = text.replace(f"-c {stub} --flag x.py", f"-c '{stub} --flag x.py'")
    truth = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, timeout=20).stdout  # noqa: S607
    [command] = [one for one in read_script(text, tmp_path / "run.sh").commands if one.words[0][0] == str(stub)]
    assert command.variables.get("V", "none") == truth


def test_a_variable_that_is_not_exported_is_named(tmp_path: Path) -> None:
    for start, is_named in (("", True), ("export ", False)):
        (tmp_path / "run.sh").write_text(
            f"{start}PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{start}NCCL_ALGO=Ring\nNCCL_HEARTBEAT=9\n"
            "torchrun pretrain_gpt.py --num-layers 2 --timeout $NCCL_HEARTBEAT\n"
        )
        warnings = Job.read(tmp_path / "run.sh").warnings
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "NCCL_ALGO"):
            assert any(f"sets {name} and does not export it" in one for one in warnings) == is_named
        # A variable that NCCL does not read, or that changes no memory, is the script's own.
        assert not any("sets NCCL_HEARTBEAT" in one for one in warnings)
