"""Random valid launch scripts, what bash starts for them, and how far memlab's reading agrees with it."""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell.script import Script

PROGRAM = "torchrun"
_END = "\x1e"
"""What the stub prints after the arguments of one start."""
_SECONDS = 5
_NAMES = ("TP", "PP", "EP", "LEN")
_ARRAYS = ("ARGS", "MORE")
_LEAVES = {
    "name": list(_NAMES),
    "array": list(_ARRAYS),
    "text": ["1", "2", "8", "4096", "qwen3-30b", "a b", "x=y", "", "--bf16", "07", "a,b,c", "p/q/r.yaml", "  c  d ", "Ab"],
    "pattern": ["*", "?", "a*", "*b", "*/", "/*", "[0-9]", "[!a]", "q*3", "-", "*.yaml", "[a-c]*"],
    "replaced": ["a", "b", "*", "?", "[a-c]", "qw*n", "#a", "%b", ",", "/a", "/?", "/,", "/[0-9]"],
    "digit": list("0123456789"),
    "small": list("1234"),
    "sign": ["+", "-", "*", "&", "|", "^", "<", "<=", "==", "!=", "&&", "||"],
    "sign_with_small": ["/", "%", "**", "<<", ">>"],
    "change": ["#", "##", "%", "%%"],
    "letters": [",", ",,", "^", "^^", "^^[a-c]", "@Q", "@U", "@L", "@u"],
    "default": [":-", "-", ":+", "+", ":="],
}  # fmt: skip
_TEMPLATES = {
    "quoted": ["'<text>'", '"<text>"'],
    "calculation": [
        "<digit>", "<digit>", "0x1F", "010", "2#101", "${#<name>}", "(N+=1, N)", "(<calculation> <sign> <calculation>)", "-(<calculation>)",
        "<calculation> <sign> <calculation>", "(<calculation>) <sign_with_small> <small>", "!(<calculation>)", "~<calculation>",
        "(<calculation>) ? (<calculation>) : 3",
    ],
    "inner": ["1", "a b", "x", "", "'q r'", '"s  t"', "x\\ y", "*", "$TP", "<expansion>"],
    "parameter": [
        "$<name>", "${<name>}", "${<name><default><inner>}", "${<name><default><inner>}", "${<name><change><pattern>}", "${<name>/<replaced>/x}",
        "${<name>/<replaced>}", "${<name>/<replaced>/<inner>}", "${<name><letters>}", "${#<name>}", "${<name>: -<small>}", "${<name>:<digit>:<small>}",
        "${<name>:$((1 - 1)):2}", "${<name>:${ZERO:-0}:2}", "${!<name>@}", "${<array>}", "${<array>[@]}", "${<array>[*]}", "${<array>[0]}",
        "${<array>[-1]:-none}", "${<array>[1]-none}", "${#<array>[@]}", "${#<array>[0]}", "${!<array>[@]}", "${<array>[@]:1}", "${<array>[@]: -1}",
        "${<array>[@]:0:2}", "${<array>[@]/a/x}", "${<array>[@]#?}", "${<array>[@]+yes}", "${<array>[@]:-none}", "${<array>[@]@Q}", "${@}", "${*}", "$#",
        "${1-none}", "${2:-none}", "${@:1}", "${@: -1}", "${@:1:1}", "$?",
    ],
    "expansion": [
        "<parameter>", "<parameter>", "<parameter>", "$((<calculation>))", "$(echo <word>)", "$(printf '%s-' <word>)", "`echo <quoted>`",
        "$(printf '%02d' <digit>)", "$(echo $((<calculation>)))", "$(<name>=9; echo $<name>)", "$(for i in 1 2; do echo $i; done)",
    ],
    "word": [
        "<quoted>", "<quoted>", "<expansion>", '"<expansion>"', '"<expansion>"', "a<expansion>b", '"a <expansion>"<quoted>', "a{x,<small>}", "{x,y=<small>}",
        "{1..<small>}", "{<small>..9..3}", "{a..d}", "{01..3}", "{9..1..4}", 'x{1,2}"$TP"', '{${TP},"a b"}{1,2}', '{"$TP",$PP,x}', "{one}", "{a,{b,c}}",
        "--flag=<expansion>", "$'a\\tb'", "$'\\x41\\101'", '"\\$TP \\" \\a"', "a~", '"${<array>[@]}"', "'it'\\''s'", '"$@"', '"pre${<array>[@]}post"', "'{a,b}'",
    ],
    "words": ["", "<word>", "<word> <word>", "<word> <word> <word>"],
    "condition": [
        '[ "$<name>" = <quoted> ]', "[[ $<name> == <quoted> ]]", "[[ $<name> == <pattern> ]]", '[ -z "$<name>" ]', '[ -n "${<name>:-}" ]', "(( <calculation> ))",
        "[[ $<name> =~ ^[0-9]+$ ]]", "[[ $<name> =~ (qwen)([0-9]*) ]]", '[[ "$<name>" != *a* ]]', "true", "false", "[[ -v <name> ]]", "[ $# -gt <small> ]",
        "[[ $<name> < m ]]", '[ "${#<array>[@]}" -eq <small> ]', "[[ -n $<name> && $<name> != a* ]]", "[[ ( -z $<name> || $<name> == *2* ) && 1 -lt 2 ]]",
        '[ "$<name>" = a -o -n "$<name>" ]', "test <digit> -le 4", "[[ $<name> == @(1|2|a*) ]]", "[[ $<name> == [[:digit:]]* ]]", '! [ -n "$<name>" ]',
        '[[ $<name> = "$<name>" ]]', "<condition> && <condition>", "<condition> || <condition>",
    ],
    "assignment": [
        "<name>=<word>", "<name>=<word>", "<name>+=<word>", "<name>=$((<calculation>))", "<array>=(<words>)", "<array>+=(<words>)", "<array>[<small>]=<word>",
        "<array>[${#<array>[@]}]=<word>", "<array>+=<word>", "<name>=<word> <name>=<word>", "export <name>=<word>", "declare <name>=<word>", "unset <name>",
        "unset '<array>[0]'", ": ${<name>:='d'}", "declare -i I=2*3; <name>=$I; I+=4; <name>+=$I", "declare -l L=ABC; L+=De; <name>=$L",
        "declare -u U; U=abc; <name>=$U", "((<name> = <calculation>))", "let '<name> = <digit> + 2'", "printf -v <name> '%s/%03d' a 7",
        'declare -A MAP=([k]=<quoted> ["l m"]=2); MAP[$TP]=3; <array>+=("${#MAP[@]}" "${MAP[l m]}" "${MAP[none]-n}")', "<array>=([2]=c [0]=a d)",
        "read -r <name> <name> <<< <word>", 'IFS=, read -ra <array> <<< "$<name>"', "IFS=/ read -r <name> _ <<< 'p/q/r'", 'mapfile -t <array> <<< "$<name>"',
        "readarray -t <array> < <(printf '%s\\n' a 'b c')", "IFS=,; <array>=($<name>); unset IFS", "IFS=:; <name>=\"${<array>[*]}\"; IFS=$' \\t\\n'",
        '<name>=$(while read -r line; do echo "<$line>"; done <<EOF\nx $<name>\n y\nEOF\n)', "read -r <name> <<EOF\n$<name> y\nEOF", "set -- <words>",
        'set -- "$@" <word>', "shift", "declare -n REF=<name>; REF=<word>; unset -n REF", "eval <name>='x y'", 'eval "<name>=\\${<name>}"', "declare <name>",
        "<name>=<word> true", "<name>=<word> eval 'LEN=$TP'", "export <name>", "readonly RO=<word>; <name>=$RO", "declare -a <array>=(<word>)",
        "lower=<word>; <name>=$lower", "local x 2> /dev/null", '<array>=("${<array>[@]/#/-}")', '<array>=("${<array>[@]%b}")',
    ],
    "statement": [
        *["<assignment>"] * 25, "if <condition>; then\n<statement>\nelse\n<statement>\nfi",
        "if <condition>; then\n<statement>\nelif <condition>; then\n<statement>\nfi",
        'case "$<name>" in\n  <pattern>) <statement> ;;\n  1|2|a*) <statement> ;;\n  *) <name>=star ;;\nesac',
        'for x in <words>; do\n<array>+=("$x")\n<statement>\ndone', 'for x in <words>; do\n<condition> && break\n<array>+=("$x")\ndone',
        'for x in <words>; do\n<condition> && continue\n<array>+=("$x")\ndone', "i=0\nwhile [ $i -lt <small> ]; do\ni=$((i + 1))\n<statement>\ndone",
        "i=3\nuntil (( i <= <small> )); do\n((i--))\n<array>+=($i)\ndone", 'for ((i = 0; i < <small>; i++)); do <array>+=("$i"); <condition> && break; done',
        "<condition> && { <statement>\n}", "<condition> || <name>=<word>", "(\n<statement>\n)", "<condition>\n<name>=$?", '<program> --tp "$<name>" <word>',
        "{ <statement>\n} > /dev/null 2>&1", "echo <word> | { <statement>\n}",
        "if <condition>; then\nlayout() { <statement>\n}\nelse\nlayout() { <statement>\n}\nfi\nlayout <word>",
        "while read -r line; do <array>+=(\"$line\"); done <<< $'a\\nb c'", "select x in a b; do <name>=$x; break; done <<< 1 2> /dev/null",
        "shopt -s lastpipe\nprintf '%s\\n' p q | while read -r x; do <array>+=(\"$x\"); done\nshopt -u lastpipe",
        "while :; do\n<statement>\n<condition> || break\nbreak\ndone", "(exit <digit>) && <name>=yes || <name>=no",
        "<condition> && (<name>=in; exit 3)\n<array>+=($?)", 'if [[ $<name> =~ ([a-z]+)([0-9]*) ]]; then <array>=("${BASH_REMATCH[@]}"); fi',
        "each() { local l; while IFS= read -r l; do <array>+=(\"$l\"); done; }\neach <<'EOF'\na $TP\n b\\\nEOF",
        "shopt -s nocasematch extglob\n[[ $<name> == AB ]] && <name>=folded\nshopt -u nocasematch", *["<function>\n<call>"] * 8,
    ],
    "function": [
        "f() {\n<statement>\n}", "f() {\nlocal <name>=<word>\n<statement>\n}", "f() {\nlocal -a <array>=(1 2)\n<statement>\n}", 'f() {\nshift\n<name>="$*"\n}',
        "f() {\n<condition> && return 1\n<statement>\n}", 'f() {\nlocal -n out=$1; out=(<word> "${@:2}")\n}', 'f() {\nfor x; do <array>+=("<$x>"); done\n}',
        'f() {\nwhile [ $# -gt 0 ]; do\ncase $1 in\n-a) <name>=$2; shift ;;\n*) <array>+=("$1") ;;\nesac\nshift\ndone\n}', 'f() {\n<program> in <word> "$@"\n}',
        "f() {\nlocal OPTIND opt\nwhile getopts 'ab:' opt; do\ncase $opt in\na) <name>=a ;;\nb) <array>+=(\"$OPTARG\") ;;\nesac\ndone\nshift $((OPTIND - 1))\n}",
    ],
    "call": ["f <words>", "f -a 4 x -b 'y z'", "f <array> 1 2", "f -a -b 7 rest", 'f "$@"', "f <name> || <name>=failed", "<name>=$(f; echo out)"],
}  # fmt: skip
_PLACE = re.compile(rf"<({'|'.join([*_LEAVES, *_TEMPLATES, 'program'])})>")
_DEEPEST = 6


class ScriptMaker:
    """Makes scripts from a seed: templates whose places are filled with leaves and with other templates."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def script(self) -> str:
        """Returns a script of a few statements, whose last command shows what they left in the variables."""
        lines = [f"{name}={self._filled('quoted', 0)}" for name in _NAMES]
        lines += [f"{name}=({self._filled('words', 3)})" for name in _ARRAYS]
        lines += [self._filled("statement", 0) for _ in range(self.rng.randint(3, 9))]
        shown = [f'"${{{name}-unset}}"' for name in _NAMES] + [f'"${{{name}[@]}}"' for name in _ARRAYS]
        lines.append(f"{PROGRAM} --nproc-per-node 8 pretrain_gpt.py {' '.join(shown)} {self._filled('word', 2)}")
        return "\n".join(lines) + "\n"

    def arguments(self) -> list[str]:
        """Returns what a script is started with."""
        return [self.rng.choice(_LEAVES["text"]) for _ in range(self.rng.randint(0, 3))]

    def _filled(self, kind: str, depth: int) -> str:
        """Returns a text of a kind; deep inside of others, one of the first and simplest templates."""
        if kind == "program":
            return PROGRAM
        if kind in _LEAVES:
            return self.rng.choice(_LEAVES[kind])
        choices = _TEMPLATES[kind]
        template = self.rng.choice(choices if depth < _DEEPEST else choices[:1])
        return _PLACE.sub(lambda place: self._filled(place[1], depth + 1), template)


def starts_of_bash(script: Path, folder: Path, arguments: list[str] | None = None) -> list[list[str]]:
    """Runs a script with bash, and returns the arguments of each start of `PROGRAM`.

    No other program can start: the search path has a stub of `PROGRAM` only.

    Args:
        script: Of shell builtins and `PROGRAM` only.
        folder: Where the stub and its output are kept.
        arguments: What the script is started with.

    Raises:
        subprocess.TimeoutExpired: If the script runs for more than a few seconds.
    """
    found = folder / "started"
    found.write_bytes(b"")
    stub = folder / "bin" / PROGRAM
    if not stub.exists():
        stub.parent.mkdir()
        stub.write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" '{_END}' >> '{found}'\n")
        stub.chmod(0o755)
    subprocess.run(
        ["/bin/bash", "-c", 'ulimit -t 3 -f 2000; exec /bin/bash "$0" "$@"', str(script), *(arguments or [])],
        check=False, capture_output=True, timeout=_SECONDS, cwd=folder, stdin=subprocess.DEVNULL, env={"PATH": str(stub.parent)},
    )  # fmt: skip
    texts = os.fsdecode(found.read_bytes()).split("\0")[:-1]
    starts: list[list[str]] = [[]]
    for text in texts:
        if text == _END:
            starts.append([])
        else:
            starts[-1].append(text)
    return starts[:-1]


def compared(read: Script, starts: list[list[str]]) -> str:
    """Compares what memlab read with what bash started.

    Returns:
        ``equal``; ``said`` if memlab says what it does not know, and what it knows is right; else ``wrong``.
    """
    commands = [one for one in read.commands if one.words[0][0] == PROGRAM]
    words = [[word for word, _ in one.words[1:]] for one in commands]
    if words == starts:
        return "equal"
    if read.warnings or read.causes or any(not one.is_certain for one in commands):
        return "said"
    if len(words) != len(starts):
        return "wrong"
    return "said" if all(can_be(*pair) for pair in zip(words, starts, strict=True)) else "wrong"


def can_be(words: list[str], start: list[str]) -> bool:
    """Whether words can become these; one of which a part is unknown can become any number of them."""
    parts = [".*" if UNKNOWN in word else re.escape(f"{word}\0") for word in words]
    return re.fullmatch("".join(parts), "".join(f"{text}\0" for text in start), re.DOTALL) is not None
