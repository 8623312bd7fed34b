"""A launch script is followed without being run: what can be seen is read, everything else is unknown."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from memlab.jobs.entries import UNKNOWN, UNKNOWN_WORDS
from memlab.jobs.shell.filters import lines_with, substituted
from memlab.jobs.shell.script import read_script


def words_of(text: str, path: Path = Path("run.sh"), **variables: str) -> list[str]:
    """Returns the words of the script's last command, unknown ones as one."""
    words = [word for word, _ in read_script(text, path, variables).commands[-1].words]
    return [UNKNOWN if word == UNKNOWN_WORDS else word for word in words]


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
        ("run $((1 / 0)) $((x)) $((__import__)) $((1if 2else 3)) $(('\\d')) $((1 << 64)) $((2 ** -1))", [UNKNOWN] * 7),
        ("run $(rm -rf /) `whoami` $(echo $(nproc)) a$(x)b", [UNKNOWN, UNKNOWN, UNKNOWN, f"a{UNKNOWN}b"]),
        ("A=(1 'b c' # no\n  $((1+1))\n)\nA+=(last)\nrun \"${A[@]}\" ${A[1]} \"${A[*]}\"", ["1", "b c", "2", "last", "b", "c", "1 b c 2 last"]),
        ('A=("--fp8-format hybrid" --bf16 "")\nrun ${A[@]} ${A[*]} "${A[@]}"', ["--fp8-format", "hybrid", "--bf16"] * 2 + ["--fp8-format hybrid", "--bf16", ""]),
        ("run a \\\n  b \\\r\n  c # d\n", ["a", "b", "c"]),
        ("run 'two\nlines' \"a\\\"b\" a\\ b", ["two\nlines", 'a"b', "a b"]),
        ("X=1 Y=2 run $X", [UNKNOWN]),
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
        ("for i in $(seq 2); do A=$i; done\nrun ${A:-none} $i", ["none", UNKNOWN]),
        ("declare -A M=([a]=1 [b]=2)\nrun ${M[@]} ${!M[@]} ${M[$X]}", [UNKNOWN] * 3),  # bash gives them in no order
        ("read -r A B < file\nmapfile -t C < file\nread -n 1 D <<< x\nrun $A $B ${C[0]} $D", [UNKNOWN] * 4),
        ("x | while read -r A; do run $A; done", [UNKNOWN]),
        ("run $1 ${1:-8} $# $HOME ${HOME:-8}", [UNKNOWN, "8", UNKNOWN, UNKNOWN, UNKNOWN]),
        ("ARGS=(--a 1)\nenv -u X A=1 run ${ARGS[@]} --b 2 --c", ["--a", "1", "--b", "2", "--c"]),
        ("nohup run --a &", ["--a"]),
        ("command -v run\nexec run --b\nrun never", ["--b"]),
        ('main() { echo | run in 2>&1; }\nmain "$@"', ["in"]),
        ('A=($(ls) x)\nrun ${A[0]} ${A[1]} ${#A[@]} "${A[@]}"\nf() { run $1 $2 $#; }\nf $(ls) x', [UNKNOWN] * 3),
        ("f() { shift; run $1 ${@:1}; }\nf $(ls) x", [UNKNOWN] * 2),
        ("A=(1 $(ls))\nA+=x\nA=y\nrun ${A[0]} ${A[1]}", [UNKNOWN] * 2),
        ("A=(dir/*.json)\nrun ${#A[@]} ${A[0]} dir/*.json [a] x=*", [UNKNOWN, UNKNOWN, UNKNOWN, "[a]", "x=*"]),
        ("[[ ab == !(a|c)b ]] && A=2\nB=ab\nrun $A ${B/a/<&>}", [UNKNOWN] * 2),  # bash 5.1 and 5.2 differ in the &
        ("A=$(date)\nrun ${A:-8} ${A%x} ${#A} ${A:+x} $'\\u0041' ${!A} ${!A@}", [UNKNOWN] * 7),
        ("D=1\nrun --x [0]*$D+[1]*46 [0,1]*4 x*1", ["--x", "[0]*1+[1]*46", "[0,1]*4", UNKNOWN]),
        ("run *1", [UNKNOWN]),
        ("run [1]*", [UNKNOWN]),
        ("run [1]*.json", [UNKNOWN]),
        ("A='*.json'\nrun $A ${X+*} dir/$A", [UNKNOWN, "dir/", UNKNOWN][::2]),
        ("f() { bash -c 'run $2' x 1 2; }\nf 7 8", ["2"]),
        ("bash -x -c 'run $1' a b", ["b"]),
        ("bash -euo pipefail -c 'run --a'", ["--a"]),
        ("A=1\nbash <<EOF\nrun $A \\$B\nEOF", ["1", UNKNOWN]),
        ("B=2\nsbatch --nodes=2 <<'EOF'\n#SBATCH --time=1\nsrun bash -c \"run $B\"\nEOF", ["2"]),
        ("docker run -e SHELL=/bin/bash image bash -c 'run --a'", ["--a"]),
        ("cat <<EOF | docker exec -i c bash\nrun --a\nEOF", ["--a"]),
        ("echo 'run no' | grep bash\nrun yes", ["yes"]),
        ("while read A; do which bash; [ $A = 2 ] && run $A; done <<EOF\n1\n2\nEOF", ["2"]),
        ("sbatch job.sh <<EOF\nrun no\nEOF\nrun yes", ["yes"]),
        ("bash job.sh <<EOF\nrun no\nEOF\nrun yes", ["yes"]),
        ("A=$(echo '--a   1\n --b  2' | tr '\\n' ' ' | sed 's/  \\+/ /g')\nrun $A", ["--a", "1", "--b", "2"]),
        ("A=$(echo \"--a   $(x)\" | sed 's/  */ /g')\nrun \"$A\"", [f"--a {UNKNOWN}"]),
        ("A=$(echo $(x) | sed 's/a/b/')\nB=$(sed 's/a/b/' file)\nrun $A $B", [UNKNOWN, UNKNOWN]),
        ("D=$(python3 -c 'import torch_npu' 2> /dev/null && echo npu || echo gpu)\nrun $D", ["gpu"]),
        ("bash -c 'A=2; run in $A'\nsrun --mpi=x sh -c \"$CMD\"\nbash -lc 'run --last'", ["--last"]),
        ("command -p run a\ncommand -- run b", ["b"]),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell_or_unknown(text: str, expected: list[str]) -> None:
    found = words_of(text)
    assert (found[1:] if found[:1] == ["run"] else found) == expected


# What a real shell does with the script is the truth: `train` prints its arguments.
FOLLOWED = [
    'X=1; TP=2\nif [ ! -z "$X" ]; then TP=4; fi\ntrain $TP',
    'X=1; TP=2\nif ! [ "$X" = 1 ]; then TP=4; fi\ntrain $TP',
    'X=1; TP=2\n! [ "$X" = 1 ] && TP=4\n! [[ $X == 2 ]] && PP=3\ntrain $TP $PP',
    'X=1; TP=2\nif ! [ ! "$X" = 1 ]; then TP=4; fi\ntrain $TP',
    'X=Qwen3-30B; TP=2\nif [[ "$X" == *30B* ]]; then TP=4; fi\nif [[ $X != Qwen* ]]; then TP=8; fi\ntrain $TP',
    'X=Qwen3-30B; TP=2\nif [[ "$X" == "*30B*" ]]; then TP=4; fi\nP="Qwen?-*"\n[[ $X == $P ]] && A=1 || A=0\n[[ $X == "$P" ]] && B=1 || B=0\ntrain $TP $A $B',
    "[ abc = a* ] && A=1 || A=0\n[[ abc = a* ]] && B=1 || B=0\n[[ abc == [a-c]?[!x] ]] && C=1 || C=0\n[[ abc == a\\* ]] && D=1 || D=0\ntrain $A $B $C $D",
    "N=1; TP=2\n[[ $N -gt 0 && $N -gt 5 ]] && TP=4\n[[ $N -gt 5 || ( $N -eq 1 && ! $N -eq 2 ) ]] && PP=3\ntrain $TP $PP",
    "N=3; TP=2\n[ $N -gt 0 -a $N -lt 5 ] && TP=4\n[ $N -eq 9 -o $N -eq 3 ] && PP=2\n[ $N -gt 5 ] || [ $N -eq 3 ] && CP=2\ntrain $TP $PP $CP",
    'A=1; B=1; [ "$UNSET" = 1 ] && A=2\n[ -n $UNSET ] && B=2\n[ "$UNSET" -eq 0 ] && C=2 || C=3\n[[ $UNSET -eq 0 ]] && D=2\ntrain $A $B $C $D',
    'test 3 -ge 3 && A=1\nif test -z "$X"; then B=2; fi\n[[ -v A ]] && C=3\n[[ $A && ! $Z ]] && D=4\ntrain $A $B $C $D',
    "if [[ 2 -gt 1 &&\n  1 -lt 2 ]]\nthen\n  A=1\nelse\n  A=2\nfi\ntrain $A",
    "A=0\nif ((A)); then TP=4; else TP=2; fi\nif (( A == 0 && TP <= 2 )); then PP=3; fi\ntrain $TP $PP",
    'X=5\nif [ "$X" = 5 ] && false; then A=1; elif true && [ $X -ne 5 ]; then A=2; else A=3; fi\ntrain $A',
    "if true; then if false; then A=1; else if [ a = a ]; then A=2; fi fi fi\ntrain $A",
    "A=1; false && A=2 || A=3\ntrue || A=4 && B=5\nfalse || false || C=6\ntrue && false && D=7 || D=8\ntrain $A $B $C $D",
    'X=Qwen3-30B\ncase "$X" in *30B*) TP=4;; *) TP=2;; esac\ntrain $TP',
    "M=14b\ncase $M in\n  7b | 8b) TP=1 ;;\n  (13b|14b) TP=2\n    PP=2 ;;\n  *)\n    TP=8\nesac\ntrain $TP $PP",
    'case "$UNSET" in "") A=empty;; *) A=full;; esac\ncase x in "*") B=1;; ?) B=2;; esac\ntrain $A $B',
    "X=b\ncase $X in a) if true; then A=1; fi;; b) case c in c) A=2;; esac; B=3;; esac\ntrain $A $B",
    'TP=2\n[ "$N" = 1 ] && { TP=4; PP=2; }\ntrain $TP ${PP:-1}',
    'N=1; TP=2\n[ "$N" = 1 ] && { TP=4; PP=2; } || { TP=8; }\ntrain $TP ${PP:-1}',
    "TP=2\n(TP=4; echo; train in $TP)\ntrain $TP",
    "TP=2\nTP=4 echo hi\nTP=8 PP=3 train $TP\ntrain $TP ${PP:-1}",
    "TP=2\nTP=4 | cat\n{ PP=3; } | cat\ntrain $TP ${PP:-1} | cat\ntrain end",
    "TP=2\n{ TP=4; train a $TP; }\nif ( false ); then A=1; else A=2; fi\ntrain $TP $A",
    "TP=2; TP=4 & wait\ntrain $TP",
    "small() {\n  TP=1\n}\nlarge() {\n  TP=4\n}\nsmall\ntrain $TP",
    "function set_tp {\n  TP=$1\n  PP=${2:-7}\n}\nset_tp 8\ntrain $TP $PP",
    'TP=2\nf() { local TP=9 X; train inner $TP $#; OUT=$1; }\nf "a b" c\ntrain "$TP" "$OUT"',
    'f() { [ "$1" = big ]; }\nif f big; then A=1; fi\nif f small; then B=1; else B=2; fi\nf big && C=3\ntrain $A $B $C',
    'f() { if [ "$1" = x ]; then return 0; fi; A=late; return 1; }\nf x && B=1\nf y || C=2\ntrain ${A:-none} $B $C',
    'main() {\n  parse "$@"\n  train $TP ${NAMES[@]}\n}\nparse() {\n  while_args=("$@")\n  TP=$1; shift\n  NAMES=("$@")\n}\nmain 4 x "y z"\ntrain after',
    "f() { exit 0; }\ntrain before\nf\ntrain after",
    "f() ( TP=4; train in $TP )\nTP=1\nf\ntrain $TP",
    'M=7b\nif [ "$M" = 7b ]; then TP=2; train $TP; exit 0; fi\nTP=4\ntrain $TP',
    'M=7b\nif [ "$M" = 8b ]; then train 8; exit; fi\ntrain 7',
    "( exit 0; train no )\ntrain yes",
    'for tp in 1 2 "4 8"; do train $tp; done\ntrain last $tp',
    'LIST="a b"\nfor x in $LIST c; do [ $x = b ] && continue; A+=" $x"; done\ntrain $A',
    "for i in 1 2; do for j in 3 4; do [ $j = 4 ] && continue 2; [ $i = 2 ] && break 2; train $i $j; done; done\ntrain $i $j",
    'SUM=0; ARR=(1 2 3)\nfor x in "${ARR[@]}"\ndo\n  if [ $x -eq 2 ]; then break; fi\n  SUM=$((SUM + x))\ndone\ntrain ${SUM:-0} $x',
    'while [ -n "$UNSET" ]; do TP=3; done\nuntil true; do TP=4; done\ntrain ${TP:-1}',
    'train ${X:-d} ${X-e} ${X:=f} $X ${X:+set} ${Y:+no} "${Y:-a b}"',
    ': ${TP:=4} "${PP:=2}"\ntrain $TP $PP ${#TP}',
    'A=(1 "2 3" 4)\ntrain ${A[0]} "${A[1]}" ${#A[@]} ${A[-1]} $A\nI=2\ntrain ${A[I]} ${A[$I]} ${A[I-2]}',
    "ARR=(2 4)\nARR[0]=4\nARR[2]=7\nARR[1]+=x\ntrain ${ARR[@]}",
    'A=(a b)\nA+=(c)\nA=("${A[@]}" "d e")\ntrain "${A[@]}" ; train ${A[@]}',
    "N=5\nM=$((N * 2 - 3 % 2))\nlet K=N+1\n((N += 2))\n((M++))\ntrain $N $M $K $(( (N > 3) + (N == 7 || M < 2) ))",
    'X=3; Y="$X+1"\ntrain $(( $Y * 2 )) $((X)) $(( -X / 2 ))',
    'A=\'x $B "q"\'\nB="v \'$A\' \\$B"\ntrain "$A" "$B" \'it\'"\'"\'s\' a\\ b',
    "A=ab\\\ncd\ntrain --a 1 \\\n  --b $A \\\n  # comment\ntrain x#y # z",
    'cat <<EOF > /dev/null\ntrain no\nif\nEOF\ncat <<-\'END\' | cat > /dev/null\n\ttrain "no\n\tEND\ntrain yes',
    'train a > /dev/null 2>&1\ntrain b 2>/dev/null >&1 c\ntrain d &> /dev/null\ncat <<< "x y" > /dev/null\ntrain e < /dev/null',
    'unset TP\nTP=3\nunset TP\ntrain ${TP:-1}\nexport A=1 B="2 3"\nreadonly C=4\ndeclare -r D=5\ntrain $A "$B" $C $D',
    'cmd="train --a \'b c\'"\neval "$cmd"\neval TP=4\ntrain $TP',
    "TP=1\nenv TP=5 true\nnohup true\ntrain $TP",
    'L="train --x"\n$L 1\n"$UNSET" 2>/dev/null\ntrain ${A[@]} b',
    'set -euo pipefail\nTP=2; export TP\nif [ "${TP}" -eq 2 ] 2>/dev/null; then train a; fi',
    'f() { for x; do train "$x"; done; }\nf 1 "2 3"\nset -- p q\ntrain "$@" $# $2',
    "time train a\n! train b\nif train c; then :; fi",
    'if [ "$A" ] || [ -z "$B" ]; then if [[ -z $C && -n x ]]; then TP=4; elif true; then TP=8; else TP=1; fi; else TP=2; fi\ntrain $TP',
    "N=8\nif [ $N -lt 4 ]; then T=a\nelif [ $N -lt 8 ]; then T=b\nelif [ $N -le 8 ]; then T=c\nelse T=d\nfi\ntrain $T",
    "for size in 7 30; do\n  case $size in\n    7) tp=1 ;;\n    30|70) tp=4 ;;\n  esac\n  train --size $size --tp $tp\ndone",
    "GPUS=8; TP=2; PP=2\nDP=$((GPUS / (TP * PP)))\n(( DP > 1 )) && FLAG=--use-distributed-optimizer\nGBS=$(( DP * 4 ))\ntrain $FLAG $GBS $(($GPUS%3))",
    'ARGS="--a 1 --b"\nARGS+=" 2"\nARGS="$ARGS --c \'x\'"\ntrain $ARGS "$ARGS"',
    'ARGS=(\n  --a 1   # one\n  # --b 2\n  --c "d e"\n)\nif [ "${#ARGS[@]}" -eq 4 ]; then ARGS+=(--f); fi\ntrain "${ARGS[@]}" "x${ARGS[1]}y"',
    'log() { echo "$@" | cat; }\nset_moe() { local n=$1; MOE=(--num-experts $n "${@:2}"); }\nlog "start (now)"\nN=4\nEP=${EP:-$((N / 2))}\ntrain --ep $EP',
    "f() { local TP=9; g; }\ng() { TP=$((TP + 1)); train in $TP; }\nTP=1\nf\ntrain $TP",
    "f() { TP=5; return; TP=6; }\nif f; then A=1; fi\ntrain $TP $A",
    "f() { A=1; g() { A=2; }; }\nf; train $A; g; train $A",
    'X="a;b" ; Y=c#d; Z="e  f"; train "$X" $Y $Z "$Z" \'$X\' "\\$X"',
    'A="it is \'quoted\'"; train "$A" ${A}x "${A:+"yes"}"',
    "TP=2 # TP=4\n# if [ 1 = 1 ]; then\ntrain $TP # &&\ntrain a#b \\#c",
    "a=1;b=2;[ $a = 1 ]&&c=3||c=4;train $c;{ d=5;};train $d",
    "if [ 1 = 1 ] # yes\nthen # comment\n  TP=4\nfi # end\ntrain $TP",
    "true &&\n  # why\n  TP=4\nfalse ||\n\n  PP=2\ntrain $TP $PP",
    'case a in\n  a) ;;\n  *) TP=9;;\nesac\ncase "a b" in a\\ b) TP=2 ;; esac\ncase -x in (-*) PP=3;; esac\ntrain $TP $PP',
    'X=--tp=4; case $X in --tp=*) A=1;; --*) A=2;; esac\n[[ $X == --* ]] && B=1\n[[ "$X" != *[0-9] ]] || C=1\ntrain $A $B $C',
    "for ((i=0; i<0; i++)); do :; done 2>/dev/null\ntrain ok",
    "X=5; while [ $X -gt 9 ]; do train $X; done; until [ $X -eq 5 ]; do train no; done; train yes",
    "cat > /dev/null << EOF | cat\nif then train no $(\nEOF\ntrain yes << E2\n)\nE2\ntrain more",
    "exec 3>&1 2>/dev/null\nexec > >(cat)\ntrain a 2>&1 | tee >(cat > /dev/null) > /dev/null\ntrain b",
    "declare -a A=(1 2); declare B; typeset C=3\nf() { declare D=4; local -r E=5; declare -g F=6; train $D $E; }\nf\ntrain ${A[@]} $C ${D:-no} $F",
    'set -- --tp 4 --pp 2\nwhile_done=no\nTP=$2; shift 2; PP=$2\ntrain $TP $PP $# "$1"',
    "N=010; [ $N -eq 10 ] && A=1\n[[ 3 -lt 20 ]] && B=1\ntrain $A $B",
    "TP=1\nif : ; then TP=2; fi\nif ! true; then TP=3; fi\nif ! { false; }; then PP=2; fi\ntrain $TP $PP",
    "f() { case $1 in big) echo; TP=8;; *) return 3;; esac; }\nf big || TP=1\nf small || PP=4\ntrain $TP $PP",
    "a() { train a; b; }\nb() { train b; }\na && true\nunset -f a 2>/dev/null\nb",
    'A=(x "y z"); for e in ${A[@]}; do train "$e"; done; for e in "${A[*]}"; do train "$e"; done',
    "IF=1; then_=2; train if then fi $IF do done { } case esac",
    'A=1\nunset A B\n[ -z "${A+x}" ] && TP=3\n[ -z ${A} ] && PP=4\ntrain $TP $PP ${A-gone}',
    'HOSTS=(a b c); NNODES=${#HOSTS[@]}; [[ $NNODES -gt 1 ]] && RDZV="--nnodes $NNODES" || RDZV="--standalone"\ntrain $RDZV',
    'USE_FP8=true\nif $USE_FP8; then F=(--fp8-format hybrid); fi\n$USE_FP8 && G=1\nUSE_X=false; $USE_X && H=1\ntrain "${F[@]}" $G ${H:-0}',
    'f() { train $A $1; }\nA=1\nA=2 eval "f 3"\nset -- 9\ntrain $A $1',
    "set -- a b c\nshift 4\ntrain $1 $#\nset 4 8\ntrain $2\nf() { set 4 8; train $1; shift 3; train $#; }\nf 1",
    "case a in a) A=1 ;& b) B=1 ;& c) C=1 ;; d) D=1 ;; esac\ntrain $A $B $C ${D:-none}",
    "case a in a) A=1 ;;& b) B=1 ;;& [a-c]) C=1 ;; *) D=1 ;; esac\ntrain $A ${B:-none} $C ${D:-none}",
    'X=$(awk -F\'(\' \'{print $2}\' /dev/null)\nY=$(echo "(")Z=\nA=$(cat <<\'EOF\'\nit\'s (b\nEOF\n)\nB=$(echo \')\' # it\'s (\n)\nC=$(case x in x) echo 1;; esac)\ntrain yes',
    'train $\'a\\tb\\\'c\' $"d e" "$\'x\'" $[1+2] "\\`x\\`" "\\\\$(( 1 + 1 ))"',
    'A=x; train "\\\\$A" "\\$A" "a\\b"',
    'A=$(grep "x$" "${C+$"y)"}")\nB=${C:-"y$"} D="${C:-"z$"}"\ntrain "$B" $D',
    'train {core_attn,mlp} a{1..3}b {03..1} "{a,b}" {a} x{a,b}{c,d}',
    'set --\nA=({a,b} c)\nfor i in {1..3}; do A+=($i); done\ntrain "${A[@]}" "${A[*]}" "$*" "${#A[@]}"',
    'f() { train "$*" $* "$@"; }\nf "a b" c',
    'train ${A:-"b c"} ${A:-a\\ b} ${A:-a b} "${A:-\'d\'}" "${A:-"e f"}" ${A:-\'g h\'} "${A:-}" ${A:-}',
    'B=(1 "2 3")\ntrain "${X:-${B[@]}}" "${B[@]+"${B[@]}"}" ${B[@]:1} "${B[@]:0:1}" ${X[@]+"${X[@]}"} "${X+"x y"}"',
    "cat <<'END-1' > /dev/null\ntrain no\nEND-1\ncat <<EOF > /dev/null\n  EOF\ntrain no\nEOF\ntrain yes",
    'B=(x y)\nA=(p)\nA[${#A[@]}]=z\nA[${#B[@]}]=w\ntrain "${A[@]}"',
    "declare -i N=3+4\ntypeset -i M=N*2\ntrain $N $M",
    "B=1; ((A=1, B=2))\nC=$((D = 4))\n((E = 2 ** 3, F = 1 << 4))\ntrain $A $B $C $D $E $F",
    'M=/models/phi-4/ V=Ab_cd\ntrain ${M%/} ${M##*/} ${M#/} "${M%%/*}" ${V,,} ${V^^} ${V/_/-} ${V:1} ${V:1:2} ${V%_*} ${V#*_}',
    'set -- a "b c" d\ntrain "${@:2}" "${@:2:1}" ${#@}\nN=V; V=5\ntrain ${!N}',
    'export "A=1"; export "B$A=2"\nN=C; export "$N=4"\ntrain $A $B1 $C',
    'if [[ "${BASH_SOURCE[0]:-$0}" == "${0}" ]]; then train main; fi',
    'train $(dirname /a/b/c) $(basename /a/b/c.sh .sh) "$(dirname "$(dirname "/a/b c/d")")" $(basename "x y") `dirname a/b` $(realpath -m /a/../b) $(cd /usr/bin/.. && pwd)',
    'A=" x "; train a${A}b a"${A}"b $A ""',
    "[[ ab == a* ]] && case ab in (ab) train y;; esac",
    "A=0; export A=1 B=$A; f() { local A=5 C=$A; train $A $B $C; }; f",
    "break\ntrain yes {fd}>/dev/null\nfor i in 1 2; do for j in 1 2; do continue 9; done; train no; done; train end",
    "if (exit 1); then train no; else train yes; fi",
    'A=(); train "${A[@]}" x "${A[*]}" y ${A[@]}\ntrain "a${A[@]}b"',
    'P="[xy]"; case x in $P) train p;; esac; case x in "$P") train no;; *) train r;; esac',
    'if [ "${MODE:-fast}" = "fast" ] && [ ${N:-8} -ge 8 ]; then\n\tTP=1\nfi\ntrain $TP "${MODE:=slow}" $MODE',
]  # fmt: skip


@pytest.mark.parametrize("text", FOLLOWED)
def test_a_script_starts_what_bash_starts(text: str) -> None:
    printing = "train() { printf '%s\\037' \"$@\" >&9; printf '\\n' >&9; }\nexec 9>&1 >/dev/null 2>&1\n"
    shell = subprocess.run(
        ["/bin/bash", "-c", printing + text], check=False, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    script = read_script(text, Path("run.sh"))
    started = [[word for word, _ in one.words[1:]] for one in script.commands if one.words[0][0] == "train"]
    assert started == [line.split("\037")[:-1] for line in shell.stdout.splitlines()]
    assert started
    assert not script.warnings
    assert all(one.is_certain for one in script.commands)


@pytest.mark.parametrize(
    "text",
    [
        "if nvidia-smi; then TP=4; fi",
        "if nvidia-smi; then :; else TP=4; fi",
        "if [ 1 = 2 ]; then :; elif nvidia-smi; then :; elif [ 1 = 1 ]; then TP=4; fi",
        "[ -d /nonexistent ] && TP=4",
        "[ -d /nonexistent ] || TP=4",
        "[[ 1 -eq 1 && -f $HOME/x ]] && TP=4",
        '[ "$1" = large ] && { TP=4; }',
        'case "$1" in large) TP=4;; esac',
        "[[ $1 =~ 30B ]] || TP=4",
        "which nvidia-smi && TP=4 || true",
        "large() { TP=4; }; nvidia-smi && large",
        "nvidia-smi && eval TP=4",
        "while read line; do TP=4; done < hosts",
        "for host in $(cat hosts); do TP=4; done",
        "for file in *.json; do TP=4; done",
        "for ((i = 0; i < $(nproc); i++)); do TP=4; done",
        "until nvidia-smi; do TP=4; done",
        "(if nvidia-smi; then TP=4; fi; train)",
        "ping() { TP=4; [ -d /x ] && ping; }; nvidia-smi && ping",
    ],
)
def test_an_assignment_in_an_undecidable_branch_is_named(text: str) -> None:
    for before, value in (("TP=2", "2"), ("", UNKNOWN)):
        script = read_script(f'{before}\n{text}\nrun "$TP"', Path("run.sh"))
        assert script.commands[-1].words == [("run", 3), (value, 3)]
        said = (
            "line 2: memlab cannot decide whether the script gives TP this value, and keeps the earlier one: give it with "
            "--set TP=VALUE"
        )
        assert said in script.warnings


SET_BY_A_RUN = (
    "which variables the script sets here is known only when the job runs, and memlab keeps their earlier values: give "
    "those that matter with --set NAME=VALUE"
)
ELEMENT = "memlab cannot follow how the script sets an element of {}, so {} is unknown from here on: give it with --set {}=VALUE"
WOULD_STOP = (
    "with the variables that memlab knows, the script would stop here ({}); memlab reads the rest of the script "
    "nevertheless: set the variables that the script tests here with --set NAME=VALUE"
)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("declare -A M\nM[$1]=1", f"line 2: {ELEMENT.format('M', 'M', 'M')}"),
        ("A=(1)\nA[$1]=1", f"line 2: {ELEMENT.format('A', 'A', 'A')}"),
        (
            "nvidia-smi || : ${A:=4}",
            "line 1: memlab cannot decide whether the script gives A this value, and keeps the earlier one: give it with --set A=VALUE",
        ),
        ("export $(cat .env)", f"line 1: {SET_BY_A_RUN}"),
        ('export "$(cat name)=4"', f"line 1: {SET_BY_A_RUN}"),
        (
            'eval "$(cat setup)"',
            "line 1: the whole text that eval runs here is known only when the job runs, and memlab follows the part that it knows",
        ),
        ("f() { f; }\nf", "line 1: the function f calls itself, which memlab does not follow"),
        (
            'if [ -z "$DATA" ]; then\n  exit 1\nfi',
            f"line 2: {WOULD_STOP.format('exit 1')}",
        ),
        ("true && exit -1", f"line 1: {WOULD_STOP.format('exit -1')}"),
        ('true && exit "$ERR"', f"line 1: {WOULD_STOP.format('exit ?')}"),
        ("main() { exit 0; }\nmain | tee log", f"line 1: {WOULD_STOP.format('exit 0')}"),
        ('if [ -z "$DATA" ]; then return 1; fi', f"line 1: {WOULD_STOP.format('return 1')}"),
    ],
)
def test_what_is_not_followed_is_said(text: str, warning: str) -> None:
    script = read_script(f"{text}\nrun", Path("run.sh"))
    assert script.warnings == [warning]
    assert script.commands[-1].words[0][0] == "run"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "run --a 1 \\\n\n  --b 2 --c 3\nrun",
            "line 3: '--b' is an argument without a command, since line 2 is empty, so the job runs without the 4 words from here on: correct line 2",
        ),
        (
            "run --a 1 \\\n  # --x \\\n  --b \\\n  --c\nrun",
            "line 3: '--b' is an argument without a command, since line 2 is a comment, which ends the command, so the job runs without the 2 words from here on: correct line 2",
        ),
        (
            "run a=1 \\ \n  trainer.nnodes=1\nrun",
            "line 2: 'trainer.nnodes=1' is an argument without a command, since line 1 has blanks behind its backslash, so the job runs without the word from here on: correct line 1",
        ),
        (
            "run a.b=1\n++trainer.n_gpus=8\nrun",
            "line 2: '++trainer.n_gpus=8' is an argument without a command, since line 1 does not end in a backslash, so the job runs without the word from here on: correct line 1",
        ),
        (
            "source $(cat name)\nrun",
            "line 1: which file the script sources here is known only when the job runs, so what it sets is unknown: give it with --set NAME=VALUE",
        ),
        (
            ': "${CHECKPOINT:?set the model}"\nrun',
            "line 1: the script stops here unless CHECKPOINT is set: give it with --set CHECKPOINT=VALUE",
        ),
        (
            "A=${B:-}\nA=${A:?}\nrun ${B:-${A:?}} ${A:?}",
            "line 2: the script stops here unless A is set: give it with --set A=VALUE",
        ),
        (
            "$COMMAND \\\n  trainer.nnodes=1\nrun",
            "line 1: the script starts the command that COMMAND holds, and nothing sets COMMAND: give it with --set COMMAND='PROGRAM ARGUMENTS'",
        ),
        (
            '"${LAUNCH[@]}" --nnodes 2\nrun',
            "line 1: the script starts the command that LAUNCH holds, and nothing sets LAUNCH: give it with --set LAUNCH='PROGRAM ARGUMENTS'",
        ),
    ],
)
def test_what_is_wrong_with_the_script_itself_is_a_cause(text: str, cause: str) -> None:
    script = read_script(text, Path("run.sh"), is_job=lambda words: "run" in words)
    assert script.causes == [cause]
    assert {one.words[0][0] for one in script.commands} <= {"run", UNKNOWN_WORDS}
    assert not script.warnings


@pytest.mark.parametrize(
    "read",
    [
        "$A", '"${A}"', "${A%x}", "${A:1:2}", "${#A}", "${A[0]}", "${A:-}", "${A-}", "${A:+x}", "${A[@]:-}", "$@", "$#",
        "${B:-$A}", "${IFS:-$A}", "$((A + 1))", "$((A = 1)) $A", "< $A/x", "> $A/x", "| : $A", "| : > $A/x", "| : $A | :", "$A | :",
        "| : $A || true", "$A | : || true", "&& ! : $A | :", "; if : | : $A; then :; fi", "&& : | : $A",
    ],
)  # fmt: skip
@pytest.mark.parametrize("switch", ["set -eu", "set -euo pipefail", "set -o nounset", "set -u; set +u"])
def test_a_script_that_refuses_unset_variables_stops_where_bash_does(switch: str, read: str) -> None:
    text = f"{switch}\n: {read}\ntrue"
    stops = subprocess.run(["/bin/bash", "-c", text], env={}, check=False, capture_output=True).returncode != 0
    causes = read_script(text, Path("run.sh"), arguments=[]).causes
    assert causes == (["line 2: the script stops here unless A is set: give it with --set A=VALUE"] if stops else [])


@pytest.mark.parametrize(
    "setting",
    [
        'case "$(other)" in a) A=1 ;; esac', 'eval "$(other)"', "export $(cat .env)", "module load cuda",
        "conda activate x", "source ~/.bashrc", "read A < file",
    ],
)  # fmt: skip
def test_a_variable_that_may_be_set_is_no_reason_to_stop(setting: str) -> None:
    assert not read_script(f"set -u\n{setting}\nrun $A $SLURM_JOB_ID $HOME", Path("run.sh")).causes


@pytest.mark.parametrize(
    "text",
    [
        'A=x\n: "${A:?}" "${A?}"\nrun',
        'B=${A:-4}\n: "${B:?}"\nrun',
        "nvidia-smi || : ${A:?}\nrun",
        "source models/x.sh 2> /dev/null\n: ${A:?}\nrun",
        "COMMAND='run --a 1'\n$COMMAND --b 2",
        "$PREFIX run --b 2",
        "$WRAPPER",
    ],
)
def test_what_may_be_set_stops_no_script(text: str) -> None:
    script = read_script(text, Path("run.sh"), is_job=lambda words: "run" in words)
    assert not any("unless" in cause or "holds" in cause for cause in script.causes)


@pytest.mark.parametrize("start", [0, -1, -2])
def test_counting_does_not_end_a_script_after_set_e(start: int) -> None:
    text = f"set -e\nfor ((i = {start}; i < 2; i++)); do :; done\necho $i"
    assert subprocess.run(["/bin/bash", "-c", text], capture_output=True, text=True, check=True).stdout == "2\n"
    script = read_script(text.replace("echo", "run"), Path("run.sh"))
    assert [word for word, _ in script.commands[-1].words] == ["run", "2"]
    assert not script.warnings


def test_values_that_the_script_is_started_with_are_asked_for_and_taken() -> None:
    text = 'TP=$1; shift\nif [ "$2" = debug ]; then :; fi\nrun $TP ${1:-4} $2 "$@"'
    assert read_script(text, Path("run.sh")).lacks_arguments == (
        "line 1: the script is started with values that memlab does not know ($1 $3): give them in order behind the "
        "file, as in run.sh -- VALUE1 VALUE2 VALUE3"
    )
    script = read_script(text, Path("run.sh"), arguments=["2", "", "a b"])
    assert [word for word, _ in script.commands[-1].words] == ["run", "2", "4", "a", "b", "", "a b"]
    assert not script.lacks_arguments
    assert "($1)" in read_script("TP=${1:?the size}\nrun $TP", Path("run.sh")).lacks_arguments


def test_a_variable_of_a_missing_file_is_unknown_and_a_file_of_the_machine_sets_none() -> None:
    assert words_of("source models/x.sh\nrun ${MODEL_ARGS[@]} 1") == ["run", UNKNOWN, "1"]
    for file, is_named in ((".bashrc", True), ("venv/bin/activate", False)):
        script = read_script(f"source {file}\nrun ${{MODEL_ARGS[@]}} 1", Path("run.sh"))
        assert [word for word, _ in script.commands[-1].words] == ["run", "1"]
        assert not script.causes
        assert [one.startswith(f"line 1: the sourced file {file} does not") for one in script.warnings] == [
            True
        ] * is_named


def test_a_command_that_may_not_run_is_marked_and_has_the_values_of_its_branch() -> None:
    script = read_script("TP=2\nif nvidia-smi; then\n  TP=4\n  run $TP\nfi\nrun $TP", Path("run.sh"))
    assert [(one.words[-1][0], one.is_certain) for one in script.commands[1:]] == [("4", False), ("2", True)]


def test_a_command_has_the_variables_of_its_moment() -> None:
    text = "A=1\nexport B=2\nB=3 C=4 run --x\nA=5\nf() { local D=6; env E=7 run --y; }\nf\nrun --z"
    first, second, third = read_script(text, Path("run.sh")).commands
    assert first.variables == {"B": "3", "C": "4"}
    assert second.variables == {"B": "2", "E": "7"}
    assert third.variables == {"B": "2"}


@pytest.mark.parametrize(
    "start",
    [
        "timeout 3600 env V=a,b python x.py --x V=c",
        "sudo V=a,b python -m x y=1 V=c",
        "mpirun -np 2 -x V=a,b -x W python x.py --x",
        "docker run -e V=a,b image python x.py --x",
        "docker run --env=V=a,b image bash -c 'python x.py --x'",
    ],
)
def test_what_a_wrapper_sets_is_of_the_command(start: str) -> None:
    (command,) = read_script(f"V=0\n{start}", Path("run.sh")).commands
    assert command.variables == {"V": "a,b"}
    (command,) = read_script("srun --export=ALL,V=a,W=b python x.py", Path("run.sh")).commands
    assert command.variables == {"V": "a", "W": "b"}


def test_a_given_variable_wins_and_is_known_only_where_the_script_has_it() -> None:
    text = "TP=2\nexport TP=3\n: ${TP:=4}\nfor TP in 5; do :; done\nf() { local TP=6; run --tp $TP $PP; }\nTP=7 f"
    (command,) = read_script(text, Path("run.sh"), {"TP": "8", "PP": "9", "TPX": "10"}).commands
    assert [word for word, _ in command.words] == ["run", "--tp", "8", "9"]
    assert command.variables == {"TP": "8", "PP": "9"}


def test_variables_can_be_given_and_sourced_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("MODEL_ARGS=(--num-layers 4)\n")
    text = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "$D/models/tiny.sh"\nrun ${MODEL_ARGS[@]} ${TP:-1}'
    assert words_of(text, tmp_path / "run.sh", TP="2") == ["run", "--num-layers", "4", "2"]
    (tmp_path / "models" / "given.sh").write_text('A=("$BASE" "$1" "$0")\nfolder=$(dirname "${BASH_SOURCE[0]}")\n')
    text = f'source "{tmp_path}/models/given.sh" 9\nBASE=5 source models/given.sh 7\nrun "${{A[@]}}" $folder ${{BASE:-unset}}'
    found = words_of(text, tmp_path / "run.sh")
    assert found == ["run", "5", "7", str(tmp_path / "run.sh"), str(tmp_path / "models"), "unset"]
    text = 'R="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." &>/dev/null && pwd)"\nrun "$R" "$(pwd)" "$(dirname $(pwd))"'
    assert words_of(text, tmp_path / "run.sh") == ["run", str(tmp_path.parents[1]), UNKNOWN, UNKNOWN]
    script = read_script("source other.sh\nrun", tmp_path / "run.sh")
    assert not script.warnings
    said = "line 1: the sourced file other.sh does not exist, or is not a text of less than 1 MiB, so what it sets is unknown: "
    assert script.causes == [f"{said}put it there, or give what it sets with --set NAME=VALUE"]
    (tmp_path / "loop.sh").write_text("source loop.sh\n")
    (warning,) = read_script("source loop.sh\nrun", tmp_path / "run.sh").warnings
    assert warning.startswith(
        "line 1 of loop.sh: files source each other more than 5 deep, so what loop.sh sets is unknown: give"
    )


def test_a_file_of_the_checkout_is_read_for_its_path_on_the_jobs_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts/models").mkdir(parents=True)
    model = tmp_path / "scripts/models/tiny.sh"
    model.write_text("MODEL_ARGS=(--num-layers 4)\n")
    script = read_script(
        'source "/rooted/checkout/scripts/models/tiny.sh"\nrun ${MODEL_ARGS[@]}', tmp_path / "examples/a/run.sh"
    )
    assert [word for word, _ in script.commands[-1].words] == ["run", "--num-layers", "4"]
    (warning,) = script.warnings
    assert warning.endswith(f"which is not on this machine, and memlab reads {model}")
    # A path below a folder that this machine has is the script's own mistake, and a name alone may be any file.
    too_long = f"/{300 * 'a'}/models/b.sh"
    for path in (f"{tmp_path}/scripts/scripts/models/tiny.sh", "/rooted/checkout/tiny.sh", too_long):
        assert read_script(f"source {path}\nrun", tmp_path / "scripts/models/run.sh").causes
    monkeypatch.chdir(tmp_path)
    assert read_script("source x/scripts/models/tiny.sh\nrun", Path("examples/a/run.sh")).causes


def test_a_word_of_an_array_has_the_line_on_which_it_stands() -> None:
    (command,) = read_script("A=(\n --x 1\n --y $Y\n)\nrun ${A[@]}", Path("run.sh")).commands
    assert command.words == [("run", 5), ("--x", 2), ("1", 2), ("--y", 3), (UNKNOWN_WORDS, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nrun 'open\n", "run.sh, line 2: the quote ' is not closed: add '"),
        ("run\nX=$(echo 'a'\n", "run.sh, line 2: the expansion $( is not closed: add )"),
        ('run "a\n${B"\n', "run.sh, line 2: the expansion ${ is not closed: add }"),
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
    "brackets": "(" * 5_000,
    "double brackets": "[[ " + "( " * 50_000,
    "functions in functions": "f() " * 50_000,
    "calls": "f0() { run; }\n" + "".join(f"f{n + 1}() {{ f{n}; f{n}; }}\n" for n in range(60)) + "f60",
    "calls in a row": "f0() { run; }\n" + "".join(f"f{n + 1}() {{ f{n}; }}\n" for n in range(5000)) + "f5000",
    "loops": "A=(" + "a " * 20_000 + ")\n" + "for a in ${A[@]}; do " * 3 + "done; " * 3,
    "eval": 'A="eval \\$A"\neval $A',
    "undecided": "x && A=1\n" * 10_000,
    "snapshots": "".join(f"A{n}=1\nrun --x\n" for n in range(10_000)),
    "patterns": "[[ " + "a" * 5000 + " == " + "*a" * 500 + "b ]] && A=1",
    "arguments of env": "env " * 600 + "run",
    "brackets of a test": "[[ a" + "(" * 20_000 + "\n",
    "folders": "A=$(cd " + "dirname $0 pwd " * 300 + "())",
    "expansions in expansions": "run " + "$(" * 20_000 + ")" * 20_000,
    "case in an expansion": "X=$(" + "case a " * 20_000 + ")",
    "names": "let " + "a" * 60_000,
    "indexes": "run " + "$[" * 20_000,
    "choices": "case a in " + "b) ;; " * 20_000 + "esac",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_script_ends_soon(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(HOSTILE[name])
    try:
        read_script(HOSTILE[name], path)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("start", ["", "export "])
def test_a_script_with_more_commands_and_variables_than_real_ones_is_refused(start: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more commands and variables than any real script"):
        read_script("".join(f"{start}A{n}=1\nrun --x\n" for n in range(2000)), tmp_path / "run.sh")


LIST = "A=(" + "a " * 19_000 + ")\n"


@pytest.mark.parametrize(
    "command",
    [
        "tr '\\n' ' '", "tr '[:upper:]' '[:lower:]'", "tr A-Z a-z", "tr '/:@' '-'", "tr -cd '[:alnum:]_.-'", "tr -d ' '",
        "tr -s ' '", "tr a-c xy", "sed 's/  \\+/ /g'", "sed 's/^\\[//;s/\\]$//'", "sed -E 's/-?[0-9.]+[bBmM]//g'",
        "sed 's/[^a-z0-9._-]/-/g'", "sed 's/\\(a\\)/<\\1>/'", "sed 's/b/[&]/g'", "sed 's/ *$//'", "sed 's#/#_#g'",
        "sed 's/+/p/'", "sed -E 's/\\./+/g'", "sed 's/ /\\./g'", "sed 's/ /\\ \\&\\-\\\\/'", "sed 's/ *$/_/g'",
    ],
)  # fmt: skip
def test_filters_print_what_the_programs_print(command: str, tmp_path: Path) -> None:
    texts = ["a  b\nc   d\n", "Qwen/Qwen3-30B@x:y", "A.b-c_d 12\n", "[x];\n", ""]
    lines = [f"A{i}=$(printf '%s' '{text}' | {command})\n" for i, text in enumerate(texts)]
    script = "".join(lines) + "run " + " ".join(f'"$A{i}"' for i in range(len(texts)))
    (tmp_path / "run.sh").write_text(f"run() {{ printf '%s|' \"$@\"; }}\n{script}")
    printed = subprocess.run(["/bin/bash", tmp_path / "run.sh"], check=True, capture_output=True)
    assert words_of(script)[1:] == printed.stdout.decode().split("|")[:-1]


@pytest.mark.parametrize(
    "command",
    [
        "sed 's/a*/x/g'", "sed -E 's/(a|ab)/x/'", "sed -n p", "sed y/a/b/", "sed 's/b/\\U&/'", "sed 's/b/\\1/'",
        "sed 's/\\<a/x/'", "sed 's/a^b/x/'", "sed 's/a$b/x/'", "tr -c a b", "tr --delete a", "tr a '[b*]'",
        "tr -d '[=a=]'", "sed -E 's/(a+)+$/x/'",
    ],
)  # fmt: skip
def test_what_a_filter_does_otherwise_is_unknown(command: str) -> None:
    assert words_of(f"A=$(echo aab | {command})\nrun $A")[1:] == [UNKNOWN]


EXITING = 'A=\nfor F in "$D"/*.bin; do A=$F; done\n[ -z "$A" ] && exit 4\nrun --a\n'


@pytest.mark.parametrize("text", [f"T='{EXITING}'\nsrun bash -c \"$T\"", f"sbatch <<'EOF'\n{EXITING}EOF"])
def test_an_exit_in_a_text_for_a_shell_does_not_end_it_before_its_job(text: str) -> None:
    script = read_script(text, Path("run.sh"), is_job=lambda words: words[:1] == ["run"])
    assert [word for word, _ in script.commands[-1].words] == ["run", "--a"]
    assert any("would stop here (exit 4)" in line for line in script.warnings)


@pytest.mark.parametrize(
    "text",
    [
        "bash -c 'exit 1'\nrun --a",
        "(exit 1)\nrun --a",
        "bash -c 'exit 1; run --b' || run --a",
        "A=$(bash -c 'exit 1; run --b')\nrun --a",
    ],
)
def test_an_exit_ends_the_shell_of_its_own(text: str) -> None:
    script = read_script(text, Path("run.sh"), is_job=lambda words: words[:2] == ["run", "--a"])
    assert [word for word, _ in script.commands[-1].words] == ["run", "--a"]
    assert not script.warnings


@pytest.mark.parametrize(
    ("options", "is_followed"),
    [
        ("-N 2", True),
        ("-N2 --wait -t 1:00:00", True),
        ("--nodes 2 -W", True),
        ("--nodes=2 job.sh", False),
        ("-N 2 a b", False),
        ("-", False),
        ("-N 2 --", True),
        ("-- job.sh", False),
    ],
)
def test_sbatch_reads_its_input_where_its_options_leave_no_file(options: str, is_followed: bool) -> None:
    text = f"sbatch {options} <<'EOF'\nrun --a\nEOF"
    script = read_script(text, Path("run.sh"), is_job=lambda words: words[:1] == ["run"])
    commands = [[word for word, _ in command.words] for command in script.commands]
    assert (["run", "--a"] in commands) is is_followed


def test_what_nemo_rl_s_ray_sub_runs_is_the_job() -> None:
    def commands(text: str) -> list[list[str]]:
        script = read_script(text, Path("run.sh"), is_job=lambda words: words[:1] == ["run"])
        return [[word for word, _ in one.words] for one in script.commands]

    assert commands('N=2\nCOMMAND="run --n $N" IMAGE=x sbatch --nodes=$N ray.sub') == [["run", "--n", "2"]]
    assert commands("export COMMAND='run --a'\nsbatch ray.sub") == [["run", "--a"]]
    assert commands("COMMAND=other sbatch ray.sub") == [["sbatch", "ray.sub"]]


@pytest.mark.parametrize(
    "text",
    [
        f"{LIST}for i in ${{A[@]}}; do C={'x' * 60_000}; done",
        f"{LIST}for i in ${{A[@]}}; do [[ -n {'x' * 20_000} ]]; done",
        f"P={'a' * 60_000}\nfor x in {{1..300}}; do [[ $x == $P$x ]]; done",
        f"A={'a' * 60_000}\nB={'$A' * 5000}",
        f"A={'a' * 1_000}\nfor i in {{1..10}}; do B=${{A//a/$A}}; done",
        'B=("" ' + '"" ' * 19_000 + ')\nA=("${B[@]}"' + ' "${B[@]}"' * 100 + ")",
        "f() { run " + "$@ " * 380 + "; }\nf " + "a " * 9000,
        LIST + "run ${A[@]}\n" * 215,
        "run {1..999999}",
        "A=x\nfor i in {1..20000}; do A+=" + "x" * 50 + "; done",
    ],
)
def test_a_script_that_makes_more_text_than_any_real_one_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^run.sh, line \d+: the script expands to more than 2,097,152 characters: give"
    ):
        read_script(text, Path("run.sh"))


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = (
        f"touch {mark}\nA=$(touch {mark})\nB=`touch {mark}`\neval touch {mark}\n: ${{C:=$(touch {mark})}}\nrun $A $B $C"
    )
    words_of(text, tmp_path / "run.sh")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("exit 3\nrun", "line 1: the script ends here in any case (exit 3)"),
        ("set -e\nexit\nrun", "line 2: the script ends here in any case (exit 0)"),
        ("return 1\nrun", None),
        ("run\nexit 0", None),
        ("f() { exit 1; }\nrun", None),
        ("if true; then exit 1; fi\nrun", None),
        ("set -e\nfalse\nrun", None),
        ("(exit 1)\nrun", None),
    ],
)
def test_a_script_that_ends_before_its_job_in_any_case_says_so_first(text: str, ends: str | None) -> None:
    causes = read_script(text, Path("run.sh"), is_job=lambda words: words == ["run"]).causes
    assert [one.partition(", so it starts no job")[0] for one in causes] == ([ends] if ends else [])


def test_what_a_machine_sets_where_a_script_runs_is_no_cause() -> None:
    for name, is_needed in (("LD_LIBRARY_PATH", False), ("PBS_O_WORKDIR", False), ("CHECKPOINT", True)):
        causes = read_script(f"set -u\nexport A=x:${name}\nrun", Path("run.sh")).causes
        assert bool(causes) is is_needed


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("$(expr 512 + 3072)", "3584"),
        ("$(expr 2 \\* 7 / 3)", "4"),
        ("$(expr 010 - -2)", "12"),
        ("$(expr 7 \\> 5)", "1"),
        ("$(expr length abc)", UNKNOWN),
        ("$(expr $N + 1)", UNKNOWN),
        ('$(echo "0.0 > 0.0" | bc)', "0"),
        ('$(echo "0.001 > 0" | bc -l)', "1"),
        ('$(echo "scale=2; 7 / 2" | bc)', "3.50"),
        ('$(echo "7 / 2" | bc)', "3"),
        ('$(echo "0.25 * 0.5" | bc)', ".12"),
        ('$(echo "3 * (1 + 2)" | bc)', UNKNOWN),
        ('$(echo "scale=40; 7 / 3" | bc)', "2.3333333333333333333333333333333333333333"),
        ('$(echo "scale=90; 7 / 3" | bc)', UNKNOWN),
        ("$(awk 'BEGIN {print 3 * 2.5}')", "7.5"),
        ("$(awk 'BEGIN {print int(7 / 2) + -7 % 4}')", "0"),
        ("$(awk -v a=3 -v b=4 'BEGIN{printf \"%d\", a * b / 5}')", "2"),
        ("$(awk 'BEGIN {printf \"%.2f\\n\", 1 / 8}')", "0.12"),
        ("$(awk 'BEGIN {print 1 / 3}')", "0.333333"),
        ("$(awk 'BEGIN {exit !(0.5 > 0.2)}' && echo yes || echo no)", "yes"),
        ("$(awk 'BEGIN {exit !(0.1 > 0.2)}' && echo yes || echo no)", "no"),
        ("$(awk 'BEGIN {print 3 > 2}')", UNKNOWN),
        ("$(awk 'BEGIN {print 1 / 0}')", UNKNOWN),
        ("$(awk 'BEGIN {print b}')", UNKNOWN),
        ("$(awk '{print $1}' file)", UNKNOWN),
        ("$(awk 'BEGIN {print 0x10}')", UNKNOWN),
        ("$(awk -v x=1.50 'BEGIN {print x}')", "1.50"),
        ("$(awk -v x=1.50 'BEGIN {print (x)}')", "1.50"),
        ("$(awk -v x=1.50 'BEGIN {print x + 0}')", "1.5"),
        ("$(awk 'BEGIN {exit !(1 == 1) + 1}' && echo yes || echo no)", UNKNOWN),
        ("$(awk 'BEGIN {exit !((1 + 1) == 2)}' && echo yes || echo no)", "yes"),
        (f"$(echo '{'1' * 300} * {'2' * 300}' | bc)", UNKNOWN),
        ("$(awk 'BEGIN {print True}')", UNKNOWN),
        ("$(awk 'BEGIN {print\n3}')", UNKNOWN),
        ("$(awk -v a=3 'BEGIN {print 2a}')", UNKNOWN),
        ("$(awk -v a=3 'BEGIN {print 10%a}')", "1"),
        ("$(awk 'BEGIN {printf \"%.1f\", int(-.25)}')", UNKNOWN),
        ('$([ "$(echo "0.0 > 0.0" | bc)" -eq 1 ] && echo true || echo false)', "false"),
    ],
)
def test_sums_of_expr_and_bc_are_followed(text: str, printed: str) -> None:
    """The values are those that GNU's expr 9.1 and bc 1.07, and mawk 1.3.4, print."""
    assert words_of(f"run {text}") == ["run", printed]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("grep -q tp=4 other.yaml && echo yes || echo no", "yes"),
        ("grep -q tp=8 other.yaml && echo yes || echo no", "no"),
        ("grep t other.yaml", "tp=4"),
        ("echo tp=8 > other.yaml\ngrep t other.yaml", UNKNOWN),
        ("echo tp=8 > other.yaml\ngrep -q tp=4 other.yaml && echo yes || echo no", UNKNOWN),
        ("printf 'a\\n%s\\n' $unknown | grep a", UNKNOWN),
        ("sed -i s/4/8/ other.yaml\ngrep t other.yaml", UNKNOWN),
        ("cp new.yaml ./other.yaml\ngrep t other.yaml", UNKNOWN),
        ("echo x | tee -a other.yaml\ngrep t other.yaml", UNKNOWN),
        ("[ -f other.yaml ]\ngrep t other.yaml", "tp=4"),
        ("awk 'BEGIN {exit 4}'\necho $?", "4"),
        ("cd sub\ngrep t other.yaml", UNKNOWN),
        ("echo b | grep -qE 'a+?' && echo yes || echo no", UNKNOWN),
        ("echo b | grep -q 'a\\+b*' && echo yes || echo no", "no"),
        ("grep -q root /etc/passwd && echo yes || echo no", UNKNOWN),
        ("grep -q root / && echo yes || echo no", UNKNOWN),
        ("grep -q root ../../../../../../../etc/passwd && echo yes || echo no", UNKNOWN),
    ],
)
def test_grep_finds_what_is_certain(tmp_path: Path, text: str, found: str) -> None:
    """A file that the script may have written, a file of the machine, and a line that is not known decide nothing."""
    (tmp_path / "other.yaml").write_text("tp=4\n")
    *before, last = text.split("\n")
    text = "\n".join([*before, f"run $({last})"])
    assert words_of(text, tmp_path / "run.sh")[1:] == [found]


MANY = (
    "for one in $*; do\n  case $one in\n"
    + "".join(f"    --{n}) {n.upper()}=1 ;;\n" for n in "abcde")
    + "  esac\ndone\n"
)


def test_undecided_variables_are_named_together_and_only_where_a_job_has_them() -> None:
    def warnings(job: str) -> list[str]:
        script = read_script(f"{MANY}{job}", Path("run.sh"), is_job=lambda words: words[0] == "train")
        return [one for one in script.warnings if "cannot decide" in one]

    assert warnings("train --tp 2") == []
    assert [one.partition(": memlab")[0] for one in warnings("X=$A\nY=(--n $X)\ntrain ${Y[@]}")] == ["line 3"]
    assert "C, D" not in warnings("if [ $B = 1 ]; then TP=2; fi\ntrain $TP")[0]
    (together,) = warnings("train $A ${B} $((C + D)) $E")
    assert together.startswith("lines 3 to 7: ")
    assert "A, B, C, D, E: give what the script is started with" in together
    assert warnings("export PYTORCH_CUDA_ALLOC_CONF=x\nexport A B\ntrain") != []
    assert warnings('echo "$A"\ntrain --tp 2') == []


@pytest.mark.parametrize(
    "uses",
    [
        'srun bash -c "\n  train \\\n  --tp $A"',
        "bash <<EOF\ntrain \\\n  --tp $A\nEOF",
        "X=`expr $A \\* 2`\ntrain $X",
        "X=$(( (A + 1) * 2 ))\ntrain $X",
        'X=$(echo "$(echo "$(echo $A)")")\ntrain $X',
        'read -r X _ <<< "$A 2"\ntrain $X',
        'printf -v X "%s" "$A"\ntrain $X',
        "let X=A\ntrain $X",
        "CUDA_DEVICE_MAX_CONNECTIONS=$A \\\n  train",
        "N=A\ntrain ${!N}",
        "declare -n N=A\ntrain $N",
        "f() {\n  echo $A\n}\ntrain $(f)",
    ],
)
def test_a_job_reaches_undecided_variables_by_other_ways_than_its_own_words(uses: str) -> None:
    script = read_script(f"A=0\n{MANY}{uses}", Path("run.sh"), is_job=lambda words: words[:1] == ["train"])
    assert any("cannot decide" in one and "A" in one for one in script.warnings)


def test_an_expression_is_looked_for_only_where_that_is_quick() -> None:
    line = "a" * 600
    assert lines_with("a*c", {"q"}, line) == []
    assert lines_with("a*a*c", {"q"}, line) is None
    assert lines_with("a?" * 20 + "c", {"E"}, line) is None
    assert lines_with("a*a*c", {"F"}, f"{line}a*a*c") == [f"{line}a*a*c"]
    assert substituted(["s/a*c/x/"], line) == line
    assert substituted(["s/a*a*c/x/"], line) == UNKNOWN
