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
_TEXTS = ("1", "2", "8", "4096", "qwen3-30b", "a b", "x=y", "", "--bf16", "07", "a,b,c", "p/q/r.yaml", "  c  d ", "Ab")
_PATTERNS = ("*", "?", "a*", "*b", "*/", "/*", "[0-9]", "[!a]", "q*3", "-", "*.yaml", "[a-c]*")
_SIGNS = ("+", "-", "*", "/", "%", "**", "<<", ">>", "&", "|", "^", "<", "<=", "==", "!=", "&&", "||")


class ScriptMaker:
    """Makes one script after the other from a seed; each starts `PROGRAM` at least once."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_functions = 0

    def script(self) -> str:
        """Returns a script of a few statements, whose last command shows what they left in the variables."""
        self.num_functions = 0
        lines = [f"{name}={self._quoted(self._text())}" for name in _NAMES]
        lines += [f"{name}=({' '.join(self._word(1) for _ in range(self.rng.randint(0, 3)))})" for name in _ARRAYS]
        lines += [self._statement(2) for _ in range(self.rng.randint(3, 9))]
        shown = [f'"${{{name}-unset}}"' for name in _NAMES] + [f'"${{{name}[@]}}"' for name in _ARRAYS]
        lines.append(f"{PROGRAM} --nproc-per-node 8 pretrain_gpt.py {' '.join(shown)} {self._word(2)}")
        return "\n".join(lines) + "\n"

    def arguments(self) -> list[str]:
        """Returns what a script is started with."""
        return [self._text() for _ in range(self.rng.randint(0, 3))]

    def _one_of(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def _text(self) -> str:
        return self.rng.choice(_TEXTS)

    def _name(self) -> str:
        return self.rng.choice(_NAMES)

    def _array(self) -> str:
        return self.rng.choice(_ARRAYS)

    def _quoted(self, text: str) -> str:
        return self._one_of(f"'{text}'", f'"{text}"', re.sub(r"([ ,=*?$])", r"\\\1", text) or "''")

    def _calculation(self, depth: int) -> str:
        if depth <= 0 or self.rng.random() < 0.3:
            number = str(self.rng.randint(0, 9))
            return self._one_of(number, number, "0x1F", "010", "2#101", f"{self.rng.randint(1, 9)} * 2")
        left, right = self._calculation(depth - 1), self._calculation(depth - 1)
        sign = self.rng.choice(_SIGNS)
        if sign in ("/", "%", "**", "<<", ">>"):
            right = str(self.rng.randint(1, 5))
        return self._one_of(
            f"{left} {sign} {right}", f"({left} {sign} {right})", f"-({left})", f"!({left})", f"~{left}",
            f"({left}) ? ({right}) : 3", f"${{#{self._name()}}} + {left}", f"N{sign if sign in '+-*' else '+'}=1, N",
        )  # fmt: skip

    def _parameter(self, depth: int) -> str:
        name, array, pattern = self._name(), self._array(), self.rng.choice(_PATTERNS)
        inner = self._inner(depth - 1)
        number, other = self.rng.randint(-3, 4), self.rng.randint(-2, 4)
        return self._one_of(
            f"${name}", f"${{{name}}}", f"${{{name}:-{inner}}}", f"${{{name}-{inner}}}", f"${{{name}:+{inner}}}",
            f"${{{name}+{inner}}}", f"${{{name}:={inner}}}", f"${{{name}#{pattern}}}", f"${{{name}##{pattern}}}",
            f"${{{name}%{pattern}}}", f"${{{name}%%{pattern}}}", f"${{{name}/{self._one_of('a', 'b', '*', '?', '[a-c]', 'qw*n', '#a', '%b', ',')}/{self._one_of('x', '', '-', inner)}}}",
            f"${{{name}//{self._one_of('a', '?', ',', '[0-9]', '/')}/{self._one_of('x', '', ' ')}}}", f"${{{name}//,}}", f"${{{name},,}}",
            f"${{{name}^^}}", f"${{{name}^}}", f"${{{name},}}", f"${{{name}^^[a-c]}}", f"${{#{name}}}", f"${{{name}: {number}}}",
            f"${{{name}:{max(number, 0)}:{max(other, 0)}}}", f"${{{name}:$((1 - 1)):2}}", f"${{{name}:${{ZERO:-0}}:2}}", f"${{{array}[@]}}", f"${{{array}[*]}}",
            f"${{{array}[0]}}", f"${{{array}[-1]:-none}}", f"${{{array}[1]-none}}", f"${{#{array}[@]}}", f"${{#{array}[0]}}", f"${{!{array}[@]}}",
            f"${{{array}[@]:1}}", f"${{{array}[@]: -1}}", f"${{{array}[@]:0:2}}", f"${{{array}[@]/a/x}}", f"${{{array}[@]#?}}", f"${{{array}[@]+yes}}",
            f"${{{array}[@]:-none}}", f"${{{array}}}", "${@}", "${*}", "$#", "${1-none}", "${2:-none}", "${@:1}", "${@: -1}", "${@:1:1}",
            f"${{{name}@Q}}", f"${{{name}@U}}", f"${{!{name[0]}@}}", "$?", f"${{{array}[@]@Q}}",
        )  # fmt: skip

    def _inner(self, depth: int) -> str:
        text = self._one_of("1", "a b", "x", "", "'q r'", '"s  t"', "x\\ y", "*", "$TP")
        return text if depth <= 0 or self.rng.random() < 0.7 else self._expansion(depth)

    def _expansion(self, depth: int) -> str:
        if self.rng.random() < 0.7:
            return self._parameter(depth)
        return self._one_of(
            f"$(({self._calculation(2)}))", f"$(echo {self._word(depth - 1)})", f"$(printf '%s-' {self._word(depth - 1)})",
            f"`echo {self._quoted(self._text())}`", f"$(printf '%02d' {self.rng.randint(0, 20)})", f"$(echo $(({self._calculation(1)})))",
            f"$({self._name()}=9; echo ${self._name()})", f"$(for i in 1 2; do echo $i; done)",
        )  # fmt: skip

    def _word(self, depth: int) -> str:
        """Returns what becomes none, one or several words; nothing in it is a name of a file."""
        if depth <= 0 or self.rng.random() < 0.25:
            return self._quoted(self._text())
        number = self.rng.randint(1, 4)
        return self._one_of(
            self._expansion(depth), f'"{self._expansion(depth)}"', f'"{self._expansion(depth)}"', f'a{self._expansion(depth)}b',
            f'"a {self._expansion(depth)}"{self._quoted(self._text())}', f"{self._one_of('a', '')}{{x,{self._text().replace(' ', '') or 'y'}}}",
            f"{{1..{number}}}", f"{{{number}..9..3}}", "{a..d}", "{01..3}", "{9..1..4}", 'x{1,2}"$TP"', '{${TP},"a b"}{1,2}', '{"$TP",$PP,x}', "{one}", "{a,{b,c}}",
            f"--flag={self._expansion(depth)}", "$'a\\tb'", "$'\\x41\\101'", '"\\$TP \\" \\a"', "a~", f'"${{{self._array()}[@]}}"',
            f"'it'\\''s'", f'"$@"', f'"pre${{{self._array()}[@]}}post"', "'{a,b}'",
        )  # fmt: skip

    def _words(self, depth: int) -> str:
        return " ".join(self._word(depth) for _ in range(self.rng.randint(0, 3)))

    def _condition(self, depth: int) -> str:
        name, text = self._name(), self._quoted(self._text())
        number = self.rng.randint(0, 9)
        plain = self._one_of(
            f'[ "${name}" = {text} ]', f'[[ ${name} == {text} ]]', f"[[ ${name} == {self.rng.choice(_PATTERNS)} ]]", f'[ -z "${name}" ]', f'[ -n "${{{name}:-}}" ]',
            f"(( {self._calculation(2)} ))", f'[[ ${name} =~ ^[0-9]+$ ]]', f'[[ ${name} =~ (qwen)([0-9]*) ]]', f'[[ "${name}" != *a* ]]', "true", "false",
            f"[[ -v {name} ]]", f'[ $# -gt {number % 3} ]', f'[[ ${name} < m ]]', f'[ "${{#{self._array()}[@]}}" -eq {number % 4} ]', f'[[ -n ${name} && ${name} != a* ]]',
            f'[[ ( -z ${name} || ${name} == *2* ) && 1 -lt 2 ]]', f'[ "${name}" = a -o -n "${name}" ]', f'test {number} -le 4', f'[[ ${{{name}}} -eq ${{{name}}} ]]' if self.rng.random() < 0.1 else "[ 1 ]",
            f'[[ ${name} == @(1|2|a*) ]]', f'[[ ${name} == [[:digit:]]* ]]', f"! [ -n \"${name}\" ]", f'[[ ${name} = "${self._name()}" ]]',
        )  # fmt: skip
        if depth > 0 and self.rng.random() < 0.2:
            return f"{plain} {self._one_of('&&', '||')} {self._condition(depth - 1)}"
        return plain

    def _assignment(self, depth: int) -> str:
        name, array, word = self._name(), self._array(), self._word(depth)
        index = self._one_of("0", "1", "5", "${#" + array + "[@]}", "1+1", "-1")
        index = "0" if index == "-1" else index
        return self._one_of(
            f"{name}={word}", f"{name}={word}", f"{name}+={word}", f"{name}=$(({self._calculation(2)}))", f"{array}=({self._words(depth)})", f"{array}+=({self._words(depth)})",
            f"{array}[{index}]={word}", f"{array}+={word}", f"{name}={word} {self._name()}={self._word(1)}", f"export {name}={word}", f"declare {name}={word}",
            f"unset {name}", f"unset '{array}[0]'", f": ${{{name}:={self._quoted('d')}}}", f"declare -i {name}={self._calculation(1).replace(' ', '').replace('(', '').replace(')', '').split('?')[0].split(',')[0]}" if self.rng.random() < 0.0 else f"declare -i I=2*3; {name}=$I; I+=4; {name}+=$I",
            f"declare -l L=ABC; L+=De; {name}=$L", f"declare -u U; U=abc; {name}=$U", f"(({name} = {self._calculation(2)}))", f"let '{name} = {self.rng.randint(0, 9)} {self._one_of(*_SIGNS[:3])} 2'", f"printf -v {name} '%s/%03d' a 7",
            f"declare -A MAP=([k]={self._quoted(self._text())} [\"l m\"]=2); MAP[$TP]=3; {name}=${{MAP[k]}}; {array}+=(\"${{#MAP[@]}}\" \"${{MAP[l m]}}\" \"${{MAP[none]-n}}\")",
            f"{array}=([2]=c [0]=a d)", f"read -r {name} {self._name()} <<< {word}", f"IFS=, read -ra {array} <<< \"${name}\"", f"IFS=/ read -r {name} _ <<< 'p/q/r'",
            f"mapfile -t {array} <<< \"${name}\"", f"readarray -t {array} < <(printf '%s\\n' a 'b c')", f"IFS=,; {array}=(${name}); unset IFS", f"IFS=:; {name}=\"${{{array}[*]}}\"; IFS=$' \\t\\n'",
            f"{name}=$(while read -r line; do echo \"<$line>\"; done <<EOF\nx ${self._name()}\n y\nEOF\n)", f"read -r {name} <<EOF\n${self._name()} y\nEOF", f"set -- {self._words(depth)}", f"set -- \"$@\" {word}",
            "shift", f"declare -n REF={name}; REF={word}; unset -n REF", f"eval {name}={self._one_of('1', chr(39) + 'x y' + chr(39))}", f"eval \"{name}=\\${{{self._name()}}}\"",
            f"declare {name}", f"{name}={self._word(1)} true", f"{name}={self._word(1)} eval 'LEN=${name}'", f"export {name}", f"readonly RO={word}; {name}=$RO",
            f"typeset {name}={word}", f"declare -a {array}=({word})", f"local_{name}={word}; {name}=$local_{name}", f"local x 2>/dev/null", f"{array}=(\"${{{array}[@]/#/-}}\")", f"{array}=(\"${{{array}[@]%b}}\")",
        )  # fmt: skip

    def _block(self, depth: int) -> str:
        return "\n".join(self._statement(depth) for _ in range(self.rng.randint(1, 2)))

    def _statement(self, depth: int) -> str:
        if depth <= 0 or self.rng.random() < 0.5:
            return self._assignment(min(depth, 2) or 1)
        name, array = self._name(), self._array()
        body, other, condition = self._block(depth - 1), self._block(depth - 1), self._condition(1)
        kind = self.rng.randrange(27)
        match kind:
            case 0:
                return f"if {condition}; then\n{body}\nelse\n{other}\nfi"
            case 1:
                return f"if {condition}; then\n{body}\nelif {self._condition(0)}; then\n{other}\nfi"
            case 2:
                return f'case "${name}" in\n  {self.rng.choice(_PATTERNS)}) {body} ;;\n  1|2|a*) {other} ;;\n  *) {name}=star ;;\nesac'
            case 3:
                return f'for x in {self._words(1)}; do\n{array}+=("$x")\n{self._one_of(body, "continue", "break", condition + " && break", condition + " && continue")}\ndone'
            case 4:
                return f"i=0\nwhile [ $i -lt {self.rng.randint(0, 4)} ]; do\ni=$((i + 1))\n{body}\ndone"
            case 5:
                return f"i=3\nuntil (( i <= {self.rng.randint(0, 3)} )); do\n((i--))\n{array}+=($i)\ndone"
            case 6:
                return f'for ((i = 0; i < {self.rng.randint(0, 4)}; i++)); do {array}+=("$i"); {self._one_of(":", f"{condition} && break")}; done'
            case 7:
                return f"{condition} && {{ {body}\n}}"
            case 8:
                return f"{condition} || {name}={self._word(1)}"
            case 9:
                return f"(\n{body}\n)"
            case 10 | 11 | 12:
                self.num_functions += 1
                function = f"f{self.num_functions}"
                inside = self._one_of(
                    body, f"local {name}={self._word(1)}\n{body}", f"local -a {array}=(1 2)\n{body}", f"shift\n{name}=\"$*\"", f"{condition} && return 1\n{body}",
                    f"while [ $# -gt 0 ]; do\ncase $1 in\n-a) {name}=$2; shift ;;\n*) {array}+=(\"$1\") ;;\nesac\nshift\ndone", f"local -n out=$1; out=({self._word(1)} \"${{@:2}}\")",
                    f"local OPTIND opt\nwhile getopts 'ab:' opt; do\ncase $opt in\na) {name}=a ;;\nb) {array}+=(\"$OPTARG\") ;;\nesac\ndone\nshift $((OPTIND - 1))", f"for x; do {array}+=(\"<$x>\"); done", f"{PROGRAM} in {self._word(1)} \"$@\"",
                )  # fmt: skip
                call = self._one_of(
                    f"{function} {self._words(1)}",
                    f"{function} -a 4 x -b 'y z'",
                    f"{function} {array} 1 2",
                    f"{function} -a -b 7 rest",
                    f'{function} "$@"',
                    f"{function} {name} || {self._name()}=failed",
                    f"{self._name()}=$({function}; echo out)",
                )
                return f"{function}() {{\n{inside}\n}}\n{call}"
            case 13:
                return f"{condition}\n{name}=$?"
            case 14:
                return f'{PROGRAM} --{name.lower()} "${name}" {self._word(1)}'
            case 15:
                return f"{{ {body}\n}} > /dev/null 2>&1"
            case 16:
                return f"echo {self._word(1)} | {{ {body}\n}}"
            case 17:
                return f"if {condition}; then\nlayout() {{ {body}\n}}\nelse\nlayout() {{ {other}\n}}\nfi\nlayout {self._word(1)}"
            case 18:
                return f"while read -r line; do {array}+=(\"$line\"); done <<< $'a\\nb c'"
            case 19:
                return f"select x in a b; do {name}=$x; break; done <<< 1 2> /dev/null"
            case 20:
                return f"shopt -s lastpipe\nprintf '%s\\n' p q | while read -r x; do {array}+=(\"$x\"); done\nshopt -u lastpipe"
            case 21:
                return f"while :; do\n{body}\n{condition} || break\nbreak\ndone"
            case 22:
                return f"(exit {self.rng.randint(0, 1)}) && {name}=yes || {name}=no"
            case 23:
                return f"trap 'echo bye' EXIT\n{condition} && ({name}=in; exit 3)\n{array}+=($?)"
            case 24:
                return f'if [[ ${name} =~ ([a-z]+)([0-9]*) ]]; then {array}=("${{BASH_REMATCH[@]}}"); fi'
            case 25:
                return f"cat_it() {{ local l; while IFS= read -r l; do {array}+=(\"$l\"); done; }}\ncat_it <<'EOF'\na $TP\n b\\\nEOF"
            case _:
                return f"shopt -s nocasematch extglob\n[[ ${name} == AB ]] && {name}=folded\nshopt -u nocasematch"


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
    return "said" if all(_can_be(*pair) for pair in zip(words, starts, strict=True)) else "wrong"


def _can_be(words: list[str], start: list[str]) -> bool:
    """Whether words can become these; one of which a part is unknown can become any number of them."""
    parts = [".*" if UNKNOWN in word else re.escape(f"{word}\0") for word in words]
    return re.fullmatch("".join(parts), "".join(f"{text}\0" for text in start), re.DOTALL) is not None
