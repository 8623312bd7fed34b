"""What is wrong with a script: collected while it is followed, each with its line, its cause and the next action."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memlab.config.validation import shortened

_OF_THE_MACHINE = {
    "activate", "conda.sh", ".bashrc", ".bash_profile", ".profile", "profile", "modules.sh", "lmod.sh", "setvars.sh",
    "set_env.sh",
}  # fmt: skip
"""Files that a script sources to find its programs, and that set nothing of a job."""
_OF_AN_ENVIRONMENT = {"activate", "conda.sh"}
"""Those of them that change only where programs are found."""
_SET_BY_THE_MACHINE = re.compile(
    r"((LD_LIBRARY|LIBRARY|CPLUS_INCLUDE)_|PYTHON|C)?PATH|(PBS|SLURM|SLURMD|LSB|SGE|PJM|OMPI|PMI)_\w+"
)
"""Variables that a machine or its scheduler has where the script runs, and whose values are no user's to give."""


@dataclass(slots=True)
class Faults:
    """The faults of one script. Each text is kept once, in the order in which they were found."""

    warnings: dict[str, None] = field(default_factory=dict)
    causes: dict[str, None] = field(default_factory=dict)
    """Faults of the script itself, such as a missing sourced file: to be corrected before anything else."""
    jobs_before: dict[str, int] = field(default_factory=dict)
    """How many jobs the script has started where one of these causes ends it."""
    arguments_read: dict[str, int] = field(default_factory=dict)
    """Arguments of the script that are read although they are not given, with the first line of each."""
    lacks_files: bool = False
    """Whether the script sources a file that is not there, and that may set any variable."""
    may_set_any: bool = False
    """Whether the script runs what else may set any variable: a file of the machine's, a module, or an unknown text."""

    def warn(self, line: int, text: str) -> None:
        """Adds a warning."""
        self.warnings[f"line {line}: {text}"] = None

    def orphaned(self, words: list[str], line: int, lines: list[str]) -> None:
        """Names arguments that stand where a command would: the command before them has ended too early.

        Args:
            line: Where they stand; what a variable holds may be of another line.
        """
        name = words[0]
        number = f"{len(words)} words" if len(words) > 1 else "word"
        stands = f"line {line}: {shortened(name)} is an argument without a command"
        before = min(line - 1, len(lines))
        if not before:
            self.causes[
                f"{stands}, so the job runs without the {number} from here on: write the command in front of it"
            ] = None
            return
        text = lines[before - 1].rstrip("\r")
        if not text.strip():
            why = "is empty"
        elif text.lstrip().startswith("#"):
            why = "is a comment, which ends the command"
        elif text.rstrip().endswith("\\"):
            why = "has blanks behind its backslash"
        else:
            why = "does not end in a backslash"
        self.causes[
            f"{stands}, since line {before} {why}, so the job runs without the {number} from here on: correct line "
            f"{before}"
        ] = None

    def refused(self, line: int, what: str) -> None:
        """Names the first place where bash itself refuses the script: it runs nothing from there on."""
        said = ": bash ends the script here with a syntax error, "
        if not any(said in cause for cause in self.causes):
            self.causes[f"line {line}{said}since {what}: correct it"] = None

    def lacks_program(self, line: int, name: str) -> None:
        """Names the variable that should hold the command, where arguments alone are left because nothing sets it."""
        self.causes[
            f"line {line}: the script starts the command that {name} holds, and nothing sets {name}: give it with "
            f"--set {name}='PROGRAM ARGUMENTS'"
        ] = None

    def stops_without(self, line: int, name: str, num_jobs: int) -> None:
        """Names a variable without which the script ends, once.

        Args:
            line: Where it ends.
            num_jobs: That the script has started before.
        """
        if _SET_BY_THE_MACHINE.fullmatch(name):
            return
        said = f": the script stops here unless {name} is set: give it with --set {name}=VALUE"
        if not self.lacks_files and not any(cause.endswith(said) for cause in self.causes):
            cause = f"line {line}{said}"
            self.causes[cause] = None
            self.jobs_before[cause] = num_jobs

    def ends_here(self, line: int, how: str) -> None:
        """Names a line before the job with which the script ends whatever its variables are."""
        self.causes[
            f"line {line}: the script ends here in any case ({how}), so it starts no job; memlab reads what follows as "
            "without this line: remove it, or take the script that replaces this one"
        ] = None

    def causes_before(self, num_jobs: int) -> list[str]:
        """Returns the causes without ends of the script after the last of its jobs."""
        return [cause for cause in self.causes if not num_jobs or self.jobs_before.get(cause, 0) < num_jobs]

    def lacks_file(self, line: int, name: str, text: str) -> None:
        """Says that a sourced file is missing: first of all, unless it only says where programs are."""
        if name.rpartition("/")[2] in _OF_THE_MACHINE:
            self.may_set_any = True
            if name.rpartition("/")[2] not in _OF_AN_ENVIRONMENT:
                self.warn(line, text)
        else:
            self.lacks_files = True
            self.causes[f"line {line}: {text}"] = None

    def lacks_arguments(self, script: str) -> str:
        """Says which of the values that the script is started with are not given; nothing if it uses none."""
        places = sorted(self.arguments_read, key=lambda name: int(name[1:]))
        if not places:
            return ""
        example = " ".join(f"VALUE{number + 1}" for number in range(int(places[-1][1:])))
        return (
            f"line {min(self.arguments_read.values())}: the script is started with values that memlab does not know "
            f"({' '.join(places)}): give them in order behind the file, as in {script} -- {example}"
        )
