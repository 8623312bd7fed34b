"""Recognizes the framework of a job's file and reads its keys, in bounded time and memory, without running anything."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from memlab.config.from_json import parse_json
from memlab.config.validation import shortened
from memlab.jobs.arguments import has_argument_block, read_argument_block, read_flags, read_overrides
from memlab.jobs.bridge_package import is_recipe_file, read_recipe_file
from memlab.jobs.entries import UNKNOWN, Entries, Entry, Line, NoJobError, lines_of
from memlab.jobs.environment import changes_memory
from memlab.jobs.frameworks.framework import Framework
from memlab.jobs.frameworks.registry import (
    FRAMEWORKS,
    LOOKED_FOR,
    framework_named,
    framework_of_commands,
    framework_of_keys,
)
from memlab.jobs.frameworks.torchtitan import TORCHTITAN
from memlab.jobs.hydra_defaults import (
    SELF,
    Choices,
    Default,
    defaults_of,
    folder_in,
    key_of,
    merge_over,
    package_in,
    placed,
)
from memlab.jobs.interpolation import resolve
from memlab.jobs.model_args import model_args, take_file_of_a_launcher
from memlab.jobs.pbs import with_nodes
from memlab.jobs.recipe_command import read_recipe, take_recipe_of_file
from memlab.jobs.shell.paths import is_file, is_folder
from memlab.jobs.shell.script import Command, Script, read_script
from memlab.jobs.shell.variables import OwnArguments
from memlab.jobs.skypilot import is_task, script_of
from memlab.jobs.slurm import nodes_of, note_nodes, take_ranks
from memlab.jobs.swift_file import arguments_of, is_argument_file
from memlab.jobs.toml_file import read_toml
from memlab.jobs.yaml_tree import Node, flat, read_yaml, texts_of

_MOST_BYTES = 8 * 2**20
_MOST_BYTES_OF_A_CONFIGURATION = 2 * 2**20
_IN_A_FOLDER = (".hydra/config.yaml", "config.yaml", "run_config.yaml", "args.json")
_ACTION = "give a script, a log with a block of arguments, or a resolved configuration"
_MOST_DEFAULTS = 40
"""Files that ``defaults`` name, directly or through each other; real ones name a handful."""
_NO_SCRIPT = "is no script that could be started with values: leave out what follows --"
_FIRST_OF_A_TREE = {"model", *(one.signs.key.partition(".")[0] for one in FRAMEWORKS.values() if one.signs.key)}
"""Keys that hold others in the configurations of frameworks that have trees of keys."""


def read_file(
    path: Path, variables: dict[str, str], format_name: str | None, arguments: list[str] | None = None
) -> tuple[str, Entries]:
    """Reads a job's file.

    Args:
        path: A file, or a folder in which a framework keeps its resolved configuration.
        variables: Given for a script; the entries' environment has those that it reads or sets.
        format_name: The framework whose file it is; None recognizes it.
        arguments: What a script is started with; None if that is not known.

    Returns:
        The framework's name, and the keys of the file.

    Raises:
        ValueError: If it cannot be read, is larger than any real one, or is none of the known formats.
    """
    if is_recipe_file(path):
        if arguments is not None:
            raise ValueError(f"{path.name} {_NO_SCRIPT}")
        if format_name not in (None, "bridge"):
            raise ValueError(f"the format is {format_name!r}, but {path.name} is a recipe of 'bridge': leave it out")
        return "bridge", read_recipe_file(path)
    return _read_text(_file_of(path), variables, format_name, arguments)


def _read_text(
    path: Path,
    variables: dict[str, str],
    format_name: str | None,
    arguments: list[str] | None,
    *,
    started_with: dict[str, str] | None = None,
) -> tuple[str, Entries]:
    """Reads a file; a script that another one starts has what that one exports."""
    text, is_whole = _text(path)
    is_object = path.suffix == ".json" or _OBJECT.match(text) is not None
    is_script = path.suffix not in (".json", ".yaml", ".yml", ".py", ".ipynb", ".toml") and not is_object
    if arguments is not None and (not is_script or has_argument_block(text)):
        raise ValueError(f"{path.name} {_NO_SCRIPT}")
    if has_argument_block(text):
        entries = read_argument_block(text, path.name)
        if not is_whole:
            entries.warnings.append(
                "the log has more than 8 MiB, and memlab reads only the first 8 MiB: a block of arguments of a later "
                "start is not seen"
            )
        found = "slime" if "actor_num_nodes" in entries.by_key else "megatron-lm"
        return format_name or found, entries
    if len(text) > _MOST_BYTES_OF_A_CONFIGURATION:
        where = "" if is_whole else " in its first 8 MiB"
        raise NoJobError(f"{path.name} has more than 2 MiB and no block of arguments{where}: {_ACTION}")
    if is_object:
        return _json_format(text, path, format_name, variables)
    root = read_yaml(text, path.name) if path.suffix in (".yaml", ".yml") else None
    if root is not None and not is_task(root):
        return _yaml_format(root, path, format_name, variables)
    if path.suffix in (".py", ".ipynb"):
        raise NoJobError(f"{path.name} is a program, which memlab never runs: {_ACTION}")
    if path.suffix == ".toml":
        return _toml_format(text, path, format_name)
    return _of_script(text if root is None else script_of(root), path, variables, format_name, arguments, started_with)


def _of_script(
    text: str,
    path: Path,
    variables: dict[str, str],
    format_name: str | None,
    arguments: list[str] | None,
    started_with: dict[str, str] | None,
) -> tuple[str, Entries]:
    of_slurm = nodes_of(text)
    text, of_pbs = with_nodes(text)
    script = read_script(text, path, of_slurm | variables, arguments=arguments, environment=started_with, is_job=is_job)
    is_started = started_with is not None
    own = None if format_name is not None or is_started else _job_that_is_started(script, path, of_slurm | variables)
    found, entries = own or _script_format(script, path, format_name)
    if framework_named(found).knows("nproc_per_node"):
        take_ranks(text, entries)
    note_nodes(of_slurm, entries)
    entries.warnings += [of_pbs] if of_pbs else []
    return found, entries


_HYDRA_MAIN = re.compile(
    r"@hydra\.main\(\s*config_path=[\"']([^\"']{1,200})[\"'],\s*config_name=[\"']([\w-]{1,100})[\"']"
)

_HYDRA_MAIN_ELSEWHERE = re.compile(
    r"@hydra\.main\(\s*config_path=[^\"',]{1,200},\s*config_name=[\"']([\w-]{1,100})[\"']"
)
_MOST_FILES_SEARCHED = 20_000
_AT_THE_TOP = (".git", "pyproject.toml", "setup.py")


def is_job(words: list[str]) -> bool:
    """Whether the words of a command are those of a framework that memlab reads."""
    return framework_of_commands([words]) is not None


def _file_of(path: Path) -> Path:
    try:
        if path.is_dir():
            for name in _IN_A_FOLDER:
                if (path / name).is_file():
                    return path / name
            raise ValueError(f"{path} is a folder without any of {', '.join(_IN_A_FOLDER)}: give a job's file")
        if not path.is_file():
            what = "is not a file" if path.exists() else "does not exist"
            raise ValueError(f"{shortened(path)} {what}: give a job's file")
    except OSError as error:
        raise _unreadable(path, error) from error
    return path


def _unreadable(path: Path, error: OSError) -> ValueError:
    reason = (error.strerror or type(error).__name__).lower()
    return ValueError(f"{shortened(path)} cannot be read ({reason}): give a job's file")


def _text(path: Path) -> tuple[str, bool]:
    """Returns the text of a file, at most 8 MiB of it, and whether that is all."""
    try:
        with path.open("rb") as file:
            content, rest = file.read(_MOST_BYTES), file.read(1)
    except OSError as error:
        raise _unreadable(path, error) from error
    text = content.decode("utf-8", errors="replace").removeprefix("\ufeff")
    if UNKNOWN in text:
        raise NoJobError(f"{path.name} is not a text: {_ACTION}")
    if not text.strip():
        raise NoJobError(f"{path.name} is empty: {_ACTION}")
    return text, not rest


def _text_of_configuration(base: Path) -> str:
    """Returns the text of a configuration that a job names; no real one is as large as a log."""
    content, is_whole = _text(base)
    if not is_whole or len(content) > _MOST_BYTES_OF_A_CONFIGURATION:
        raise ValueError(f"{base.name} has more than 2 MiB: {_ACTION}")
    return content


def _toml_format(text: str, path: Path, format_name: str | None) -> tuple[str, Entries]:
    if format_name is not None:
        raise ValueError(
            f"{path.name} is a TOML file, which memlab reads as a job of torchtitan only: leave --format {format_name} "
            "out"
        )
    entries = read_toml(text, path.name)
    sections = {key.partition(".")[0] for key in entries.by_key}
    if not {"model", "training"} <= sections:
        raise NoJobError(f"{path.name} is a TOML file, and none of torchtitan's: {_ACTION}")
    return TORCHTITAN.name, entries


def _json_format(text: str, path: Path, format_name: str | None, variables: dict[str, str]) -> tuple[str, Entries]:
    values = parse_json(text, path.name, "give the args.json that ms-swift writes")
    if not isinstance(values, dict) or len(values) > 20_000:
        raise NoJobError(f"{path.name} holds no object of arguments: give the args.json that ms-swift writes")
    trees = {key for key, value in values.items() if isinstance(value, dict)}
    if trees & _FIRST_OF_A_TREE or (format_name is not None and framework_named(format_name).style == "overrides"):
        root = read_yaml(text.replace("\t", " "), path.name)  # JSON is YAML
        return _yaml_format(root, path, format_name, variables)
    if format_name is None and "model_type" in values and not is_argument_file(values):
        raise NoJobError(
            f"{path.name} has the sizes of a model ({shortened(values['model_type'])}), must have a job's arguments: "
            f"give the job's own file, or predict a step of this model with memlab predict {path}"
        )
    if format_name is None and path.name != "args.json" and not is_argument_file(values):
        raise NoJobError(f"{path.name} is of no format that memlab reads. It looked for {LOOKED_FOR}: give --format")
    lines = {match[1]: number for number, line in enumerate(text.splitlines(), 1) if (match := _JSON_KEY.match(line))}
    entries = Entries()
    for key, value in values.items():
        entries.add(key, value if not isinstance(value, dict) else json.dumps(value), lines.get(key, 1))
    return format_name or "ms-swift", entries


def _plain(root: Node) -> dict[str, Any]:
    """Returns a file's keys with their values, and of a mapping its keys alone."""
    return {
        key: dict.fromkeys(node.value) if isinstance(node.value, dict) else node.value
        for key, node in root.value.items()
    }


_OBJECT = re.compile(r"\s*\{\s*[\"}]")
"""How JSON begins; a script's ``{`` has a command behind it."""
_JSON_KEY = re.compile(r'\s*"([^"]{1,200})"\s*:')


def _yaml_format(root: Node, path: Path, format_name: str | None, variables: dict[str, str]) -> tuple[str, Entries]:
    if "MODEL_ARGS" in root.value and isinstance(root.value["MODEL_ARGS"].value, dict):
        return format_name or "megatron-lm", model_args(root, variables, path.name)
    if format_name == "ms-swift" or (format_name is None and is_argument_file(_plain(root))):
        return "ms-swift", arguments_of(root, path.name)
    named: list[Path] = []
    entries = _with_defaults(root, path, named)
    found = format_name or framework_of_keys((*entries.by_key, *root.value))
    if found is not None:
        _take_named_defaults(root, named, framework_named(found), entries)
    resolve(entries, variables)
    _collapse_targets(entries)
    if found == "bridge":
        take_recipe_of_file(path, entries)
    if found is None:
        if {"eval", "generation"} <= {key.partition(".")[0] for key in entries.by_key}:
            raise NoJobError(f"{path.name} evaluates a model by NeMo-RL, and trains none: {_ACTION} of a training")
        raise NoJobError(f"{path.name} is of no format that memlab reads. It looked for {LOOKED_FOR}: give --format")
    return found or "", entries


def _collapse_targets(entries: Entries) -> None:
    """Gives objects such as ``{_target_: torch.bfloat16, _call_: false}`` their value: a name or an argument."""
    for key, entry in list(entries.by_key.items()):
        parent, _, last = key.rpartition(".")
        if last != "_target_" or not parent:
            continue
        arguments = entries.by_key.get(f"{parent}._args_")
        if arguments is not None and isinstance(arguments.value, list) and len(arguments.value) == 1:
            entries.add(parent, arguments.value[0], entry.line)
        elif entries.get(f"{parent}._call_") is False:
            entries.add(parent, str(entry.value).rpartition(".")[2], entry.line)
        else:
            continue
        for part in ("_target_", "_args_", "_call_"):
            entries.by_key.pop(f"{parent}.{part}", None)


def _with_defaults(
    root: Node,
    path: Path,
    named: list[Path],
    chain: tuple[Path, ...] = (),
    package: str = "",
    choices: Choices | None = None,
    folder: str = "",
) -> Entries:
    """Returns the keys of a file over those of the files that its key ``defaults`` names.

    Args:
        named: Every file that was read so far; those that this one names are appended.
        choices: Of the command, and of the files that named this one.
        chain: The files that named this one, each the next.
        package: The mapping that gets the file's keys.
        folder: Of the file, from that of the first one.

    Raises:
        ValueError: If files name each other in a circle, or more than any real job's.
    """
    own = flat(root, path.name)
    defaults = root.value.get("defaults")
    for key in [key for key in own.by_key if key == "defaults" or key.startswith("defaults.")]:
        del own.by_key[key]
    own = placed(own, package)
    if defaults is None:
        return own
    searched = _searched(root, path) if not chain else []
    chain = (*chain, path.resolve())
    merged, is_placed, choices = Entries(), False, choices or Choices()
    for default in defaults_of(defaults, choices, folder, package):
        if default.name == SELF:
            merge_over(merged, own)
            is_placed = True
            continue
        base = _file_of_default(default, path, chain[0], searched)
        if base is not None:
            below = folder_in(default, folder)
            merge_over(merged, _of_default(default, base, path, named, chain, package, choices, below))
        elif not default.is_optional and default.overrides not in choices.taken:
            line = Line(default.line, path.name) if chain[1:] else default.line
            merged.warnings.append(_takes_no_file(line, default))
    if not is_placed:
        merge_over(merged, own)
    return merged


def _takes_no_file(line: int, default: Default) -> str:
    where = f"line {line}: the defaults {shortened(default.name)} are not beside the file"
    return f"{where}, so memlab takes the framework's own"


def _of_default(
    default: Default,
    base: Path,
    path: Path,
    named: list[Path],
    chain: tuple[Path, ...],
    package: str,
    choices: Choices,
    folder: str,
) -> Entries:
    """Returns the keys of a file that another one names."""
    where = f"{path.name}, line {default.line}: the defaults name"
    if base.resolve() in chain:
        raise ValueError(f"{where} each other in a circle: correct them")
    named.append(base)
    if len(named) > _MOST_DEFAULTS:
        raise ValueError(f"{where} more than {_MOST_DEFAULTS} files: give the resolved configuration")
    content = _text_of_configuration(base)
    root, package = read_yaml(content, base.name), package_in(content, default, package)
    return _with_defaults(root, base, named, chain, package, choices, folder).of_file(base.name)


def _file_of_default(default: Default, path: Path, first: Path, searched: list[Path]) -> Path | None:
    """Returns the file of an entry of the key ``defaults``, if it is there."""
    if default.file is None:
        return None
    folder = first.parent if default.file.startswith("/") and not Path(default.file).is_file() else path.parent
    base = folder / (default.file.lstrip("/") if folder == first.parent else default.file)
    bases = [base, *(folder / default.file.lstrip("/") for folder in searched)]
    return next((base for base in bases if is_file(base)), None)


def _searched(root: Node, path: Path) -> list[Path]:
    """Returns the folders of the key ``hydra.searchpath``, from each folder where the job may be started."""
    hydra = root.value.get("hydra")
    listed = hydra.value.get("searchpath") if hydra is not None and isinstance(hydra.value, dict) else None
    texts = [str(one.value) for one in listed.value] if listed is not None and isinstance(listed.value, list) else []
    names = [
        text.removeprefix("pkg://").replace(".", "/")
        if text.startswith("pkg://")
        else text.removeprefix("file:").removeprefix("//")
        for text in texts[:20]
    ]
    return [up / name for name in names if "${" not in name for up in path.absolute().parents]


def _take_named_defaults(root: Node, read: list[Path], framework: Framework, entries: Entries) -> None:
    """Takes what a file's ``defaults`` say where they name one of the framework's own configurations.

    Args:
        read: The files that its ``defaults`` name and that are there.
        entries: The keys of all of these files.
    """
    own = framework.folder_of_configurations
    entries.own_files |= {file.name for file in read if own and own in file.as_posix()}
    for default in defaults_of(root.value["defaults"]) if "defaults" in root.value else []:
        stem = Path(default.file or "").stem
        of_examples = {} if stem in {file.stem for file in read} else framework.examples
        if stem not in framework.configurations and stem not in of_examples:
            continue
        for key, value in (framework.configurations.get(stem) or of_examples.get(stem, {})).items():
            if key not in entries.by_key:
                entries.add(key, value, default.line)
        without_file = _takes_no_file(default.line, default)
        entries.warnings = [one for one in entries.warnings if one != without_file]
        if stem in of_examples:
            entries.warnings.append(_takes_an_example(f"line {default.line}", default.name, framework))


def _script_format(script: Script, path: Path, format_name: str | None) -> tuple[str, Entries]:
    recognized = framework_of_commands(_texts_of(script.commands))
    split = script.commands if recognized else [_with_split_words(command) for command in script.commands]
    if recognized is None and (recognized := framework_of_commands(_texts_of(split))) is not None:
        script = replace(script, commands=split)
        script.warnings.append(
            "the arguments of the job are one quoted word of a program that memlab does not know: memlab takes them "
            "for those of the framework's own program"
        )
    found = format_name or recognized
    # Arguments may be missing because of what could not be followed, such as a sourced file.
    causes = [*script.causes, *([script.lacks_arguments] if script.lacks_arguments else []), *script.warnings]
    cause = f"{path.name}, {causes[0]}; " if causes else ""
    by_file = _by_its_configuration(script, path) if found is None else None
    found = found if by_file is None else by_file[0]
    if found is None:
        raise NoJobError(
            f"{cause}{path.name} is of no format that memlab reads. It looked for {LOOKED_FOR}: give --format"
        )
    entries = Entries(causes=list(script.causes), warnings=list(script.warnings), undecided=script.undecided)
    command = _chosen(script, found, entries.warnings) if by_file is None else by_file[1]
    if command is not None:
        framework, words = framework_named(found), _without_own_arguments(command, entries.warnings)
        if framework.style == "flags":
            read_flags(words, entries, framework.is_switch)
            programs = [Entry("", word.rpartition("/")[2], at) for word, at in command.words if word.endswith(".py")]
            entries.program = programs[-1] if programs else None
            entries.flags_of_program = _flags_after_program(command)
            _leave_out_flags_of_the_launcher(framework, entries)
            read = partial(_argument_file, path=path, entries=entries)
            take_file_of_a_launcher(command.words, command.variables, entries, read)
            framework.take_files(words, entries, read)
        else:
            entries.environment = dict(command.variables)
            folders = [*script.folders, *_folders_of_modules(command.variables.get("PYTHONPATH", ""))]
            entries.started_in = _folder_of_program(_program_of(words), folders, path)
            words = _with_flags_as_overrides(words) if framework.flags_are_overrides else words
            _take_overrides(words, path, framework, entries)
        if by_file is not None:
            started = [word for word, _ in command.words if word.endswith(".py")][-1]
            others = [] if framework.flags_are_overrides else sorted(_flags_after_program(command) - {"config"})
            unseen = f", and does not see what {', '.join(f'--{name}' for name in others[:5])} set" if others else ""
            entries.warnings.append(
                f"line {command.line}: the script starts {shortened(started)} with a configuration of "
                f"{framework.title}: memlab takes it for a training by {framework.title}'s own program{unseen}"
            )
        entries.environment = entries.environment | command.variables
        entries.not_exported = command.not_exported
        entries.warnings += [
            f"line {command.line}: the script sets {name} and does not export it, so the job runs without it, unless "
            f"the machine has exported it before: write export {name}"
            for name in command.not_exported
            if (changes_memory(name) or (name.isupper() and framework_named(found).knows(name)))
            and name not in command.variables
        ]
        _take_environment_of_ray(command, path, entries)
        if script.lacks_arguments and _has_unknown_values(command):
            entries.causes.append(script.lacks_arguments)
    if not entries.by_key:
        raise ValueError(f"{cause}{path.name} has no arguments of {found}: {_ACTION}")
    return found, entries


_OF_A_MEETING = re.compile(
    r"--(dist[-_](url|init[-_]addr)|master[-_](addr|port)|node[-_]rank|rdzv[-_](id|endpoint))(=.*)?", re.DOTALL
)
"""Flags that say where ranks meet, and that change no rank's memory."""


def _has_unknown_values(command: Command) -> bool:
    words = [word for word, _ in command.words]
    return any(
        UNKNOWN in word and not _OF_A_MEETING.fullmatch(word) and not (flag and _OF_A_MEETING.fullmatch(flag))
        for flag, word in pairwise(["", *words])
    )


_ARGUMENT = re.compile(r"--[a-z]|[+~]*[a-z_]+[.][\w.]+=")
_LEAST_ARGUMENTS = 3
"""That a quoted word has, where it is a list of arguments."""


def _texts_of(commands: list[Command]) -> list[list[str]]:
    return [[word for word, _ in command.words] for command in commands]


def _with_split_words(command: Command) -> Command:
    """Divides the words of a command that are lists of arguments themselves."""
    words: list[tuple[str, int]] = []
    for word, line in command.words:
        try:
            parts = shlex.split(word) if len(word.split()) >= _LEAST_ARGUMENTS else []
        except ValueError:
            parts = []
        if any(_EVALUATES.search(part) for part in parts):
            parts = []
        is_list = sum(_ARGUMENT.match(part) is not None for part in parts) >= _LEAST_ARGUMENTS
        words += [(part, line) for part in parts] if is_list else [(word, line)]
    return replace(command, words=words)


def _with_flags_as_overrides(words: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns words with ``--key value`` as overrides."""
    start = max((at for at, (word, _) in enumerate(words) if word.endswith(".py")), default=-1) + 1
    found, rest = words[:start], list(reversed(words[start:]))
    while rest:
        word, line = rest.pop()
        has_value = word.startswith("--") and "=" not in word and bool(rest) and not rest[-1][0].startswith("--")
        value = [rest.pop()] if has_value else []
        if not word.startswith("--") or word.partition("=")[0] == "--config":
            found += [(word, line), *value]
        else:
            key = word.removeprefix("--")
            found.append((key if "=" in key else f"{key}={value[0][0] if value else True}", line))
    return found


def _flags_after_program(command: Command) -> frozenset[str]:
    """Returns the names of the flags behind a Python program, which are not those of what launches it."""
    texts = [word for word, _ in command.words]
    start = max((at for at, text in enumerate(texts) if text.endswith(".py")), default=len(texts))
    own = Entries()
    read_flags([one for one in command.words[start + 1 :] if not isinstance(one[0], OwnArguments)], own)
    return frozenset(own.by_key)


def _leave_out_flags_of_the_launcher(framework: Framework, entries: Entries) -> None:
    """Drops what stands before a Python program and is no key of the framework, such as ``srun --container-image``."""
    if entries.program is not None and entries.flags_of_program:
        for key in [key for key in entries.by_key if key not in entries.flags_of_program and not framework.knows(key)]:
            del entries.by_key[key]


_EVALUATES = re.compile(r"(^|[/_-])eval(uate|uation)?([_-]\w+)?\.py$")
_TRAINS_NOT = re.compile(r"(?i)eval|convert|export|infer|generat|serv|test|data|plot")


def _by_its_configuration(script: Script, path: Path) -> tuple[str, Command] | None:
    """Returns the one command with a program of one's own and ``--config``, and the framework of that file's keys."""
    found: dict[tuple[str, str], Command] = {}
    for command in script.commands:
        texts = [word for word, _ in command.words]
        programs = [text for text in texts if text.endswith(".py")]
        names = [
            text.partition("=")[2] or after for text, after in pairwise([*texts, ""]) if re.match("--config(=|$)", text)
        ]
        if (
            not programs
            or not names
            or UNKNOWN in names[0]
            or any(_TRAINS_NOT.search(Path(one).name) for one in programs)
        ):
            continue
        files = [folder / names[0] for folder in path.absolute().parents]
        file = next((one for one in files if one.suffix in (".yaml", ".yml") and is_file(one)), None)
        framework = None if file is None else framework_of_keys(_keys_of(file))
        if framework is not None and framework_named(framework).style == "overrides":
            found[framework, names[0]] = command
    return next(((name, command) for (name, _), command in found.items()), None) if len(found) == 1 else None


def _keys_of(file: Path) -> list[str]:
    root = read_yaml(_text_of_configuration(file), file.name)
    return [*_with_defaults(root, file, [file]).by_key, *root.value]


def _job_that_is_started(script: Script, path: Path, variables: dict[str, str]) -> tuple[str, Entries] | None:
    """Reads the job of the one other script that a script without a job of its own starts.

    Its name is looked for beside the script and in the folders above, as that of a script that runs from the top of a
    checkout; of an absolute name its last parts, as of a checkout that lies elsewhere.
    """
    started = [(command, given) for command in script.commands if (given := _script_and_words(command))]
    others = [command for command in script.commands if _script_and_words(command) is None]
    if framework_of_commands([[word for word, _ in command.words] for command in others]) is not None:
        return None
    # Beside a line that gives a job's keys, other scripts prepare what it needs.
    started = [one for one in started if is_job(one[1][1:])] or started
    found: list[tuple[Path, Command, list[str]]] = []
    for command, (name, *given) in started:
        file = _script_near(name, path)
        if file is not None and file.resolve() != path.resolve():
            found.append((file, command, given))
        elif file is None and is_job(given):
            script.causes.insert(0, _reads_only_a_line(command, name, "is not near"))
    if len(found) != 1:
        return None
    file, command, given = found[0]
    try:
        name, entries = _read_text(file, variables, None, given, started_with=command.variables)
    except NoJobError:
        if not is_job(given):
            raise
        script.causes.insert(0, _reads_only_a_line(command, file.name, "starts no job that memlab can read"))
        return None
    entries.warnings.append(f"line {command.line}: the script starts {file.name}, and memlab reads the job of that one")
    entries.causes[:0] = script.causes
    entries.environment = {
        one: text for one, text in command.variables.items() if one in variables
    } | entries.environment
    _without_own_arguments(command, entries.warnings)
    return name, entries


def _reads_only_a_line(command: Command, name: str, why: str) -> str:
    return (
        f"line {command.line}: the script starts {shortened(name)}, which {why}, so memlab reads only what this line "
        "gives to it: put the script that starts the job beside this one, or give its keys with --set"
    )


def _script_and_words(command: Command) -> list[str] | None:
    """Returns the script that a command starts, and the words that it gives to it; None if it starts none."""
    name, *given = [word for word, _ in command.words if not isinstance(word, OwnArguments)] or [""]
    if name.rpartition("/")[2] in ("bash", "sh") and given:
        name, *given = given
    return [name, *given] if name.endswith(".sh") else None


def _script_near(name: str, path: Path) -> Path | None:
    """Returns the script of a name, if it lies beside another one or below a folder above that."""
    folders = (path.parent, *path.absolute().parents)
    parts = name.rpartition(UNKNOWN)[2].strip("/").split("/")
    names = [name] if UNKNOWN not in name else []
    if name.startswith("/") or UNKNOWN in name:
        names += ["/".join(parts[first:]) for first in range(len(parts) - 1)]
    return next((up / one for one in names for up in folders if is_file(up / one)), None)


def _without_own_arguments(command: Command, warnings: list[str]) -> list[tuple[str, int]]:
    """Returns the words after the program, and warns where those of the script's own start would stand."""
    own = [line for word, line in command.words if isinstance(word, OwnArguments)]
    if own:
        warnings.append(
            f"{lines_of(own)}: $@ stands for what the script is started with, which memlab does not see: give it "
            "behind the file, after --, or what matters with --set KEY=VALUE"
        )
    return [(word, line) for word, line in command.words[1:] if not isinstance(word, OwnArguments)]


def _take_configuration(
    words: list[tuple[str, int]], path: Path, framework: Framework, entries: Entries, program: Entry | None
) -> None:
    """Takes the keys of the configuration that a command names from the script's folder or from one above it.

    Without ``--config-path``, Hydra looks in the folder that the source of the job's own program names.
    """
    flags = Entries()
    read_flags([one for one in words if one[0].startswith("--") or not re.match("[+~]|[^=]*=", one[0])], flags)
    for key in ("config", "config_path", "config_name"):
        entry = flags.by_key.get(key)
        if entry is None or key == "config_path":
            continue
        name, folder = str(entry.value), ""
        if key == "config_name" and "config_path" in flags.by_key:
            folder = str(flags.by_key["config_path"].value)
        # The beginning of a path that only the run knows is a folder where the job may be started.
        below = folder.rpartition(UNKNOWN)[2].lstrip("/")
        base = path.parent / (below if UNKNOWN in folder else folder) / name
        base = base if base.suffix in (".yaml", ".yml") else base.with_name(f"{base.name}.yaml")
        if framework.knows(key) and not entry.is_unknown:
            entries.by_key[key] = entry
        named = _named_for_hydra(program, path, framework, entries.started_in) if key == "config_name" else None
        if base.stem in framework.configurations:
            _take_other_defaults(base.stem, entry, framework, entries)
            if named is None or not _is_of(framework, program):
                continue
            base = named[0].parent / named[1] / base.name
        where = Path(below) / Path(name).with_name(base.name)
        # A name alone says no folder, so that a file above the script may be another job's.
        others = [up / where for up in path.absolute().parents] if key == "config" or len(where.parts) > 1 else []
        if key == "config_name" and "config_path" not in flags.by_key:
            others += [_file_of_a_name(base.name, named, path)]
        elsewhere = _of_another_machine(folder, where, base, path)
        beside, base = base, next((one for one in (base, *others, *elsewhere) if is_file(one)), base)
        is_alone = not folder and key == "config_name" and named is None and base != beside and others[-1] == base
        entries.warnings += _said_of_place(
            entry, base, is_alone=is_alone, is_elsewhere=base != beside and base in elsewhere
        )
        if entry.is_unknown or not is_file(base):
            _take_missing_configuration(name, entry, framework, entries)
            continue
        _take_configuration_file(base, words, framework, entries)


def _said_of_place(entry: Entry, base: Path, *, is_alone: bool, is_elsewhere: bool) -> list[str]:
    """Says where a configuration is that is in no folder that the job names, if there is one."""
    if is_alone:
        reads = f"{entry.place}: memlab reads {base}, the only file of that name in the repository"
        return [f"{reads}: give its keys with --set if the program reads another one"]
    if is_elsewhere and not entry.is_unknown:
        lies = f"{entry.place}: the configuration {shortened(str(entry.value))} has the folder of another machine"
        return [
            f"{lies}, so memlab reads {base}, whose path ends alike: give its keys with --set if that is another file"
        ]
    return []


def _file_of_a_name(name: str, named: tuple[Path, str, str] | None, path: Path) -> Path:
    """Returns a configuration in the folder that the program's source names, or the only one in the repository."""
    if named is not None:
        return named[0].parent / named[1] / name
    top = next((up for up in path.absolute().parents if any((up / one).exists() for one in _AT_THE_TOP)), None)
    folder = None if top is None else _folder_of_the_only(name, top)
    return path.parent / name if folder is None else folder / name


def _take_missing_configuration(name: str, entry: Entry, framework: Framework, entries: Entries) -> None:
    """Says that a configuration is missing, and takes what the one of its name in the framework's repository has."""
    example = None if entry.is_unknown else framework.examples.get(Path(name).stem)
    for key, value in (example or {}).items():
        entries.add(key, value, entry.line)
    entries.warnings.append(
        _takes_an_example(entry.place, name, framework)
        if example is not None
        else f"{entry.place}: the configuration{'' if entry.is_unknown else f' {shortened(name)}'} is not beside the "
        "script, so memlab takes the framework's own defaults: put it there, or give its keys with --set"
    )


def _takes_an_example(place: str, name: str, framework: Framework) -> str:
    return (
        f"{place}: the configuration {shortened(name)} is not beside the job, so memlab takes what it has in "
        f"{framework.title}'s repository ({framework.source}): put yours there if it is another one"
    )


def _of_another_machine(folder: str, where: Path, base: Path, path: Path) -> list[Path]:
    """Returns where a configuration may lie whose folder is none of this machine: below one that holds the script."""
    if is_folder(base.parent) or not (folder or str(where)).startswith(("/", "<")):
        return []
    ends = [Path(*where.parts[start:]) for start in range(1, len(where.parts) - 1)]
    return [up / end for end in ends for up in path.absolute().parents]


_GROUP = re.compile(r"\+{0,2}([\w/]+(?:@[\w.]+)?)=(\w[\w/.-]*)")
"""An override that chooses the option of a group, or sets a key of the top."""


def _take_configuration_file(base: Path, words: list[tuple[str, int]], framework: Framework, entries: Entries) -> None:
    """Takes the keys of a configuration, and of those that it names; the command may choose among these."""
    root, read = read_yaml(_text_of_configuration(base), base.name), [base]
    chosen = {found[1]: found[2] for word, _ in words if (found := _GROUP.fullmatch(word)) is not None}
    choices = Choices({key_of(name): None if option == "null" else option for name, option in chosen.items()})
    own = _with_defaults(root, base, read, choices=choices)
    entries.groups |= {name for name in chosen if any(key.startswith(f"{name}.") for key in own.by_key)}
    _take_named_defaults(root, read, framework, own)
    own.of_file(base.name)
    entries.merge(own)
    entries.own_files |= own.own_files
    entries.warnings += own.warnings


def _is_of(framework: Framework, program: Entry | None) -> bool:
    return program is not None and str(program.value).startswith(f"{framework.name.partition('-')[0]}.")


def _take_overrides(words: list[tuple[str, int]], path: Path, framework: Framework, entries: Entries) -> None:
    """Takes the overrides of a command over what they override: a configuration or a recipe that it names."""
    program = _program_of(words)
    _take_configuration(words, path, framework, entries, program)
    if framework.name == "bridge":
        read_recipe(words, path, entries)
    if not any(word.startswith("--config") for word, _ in words):
        entries.program = program
        _take_configuration_of_program(words, path, framework, entries)
        _take_file_in_source(path, framework, entries)
    elif framework.knows("config_name"):
        entries.program = program
    read_overrides([one for one in words if one[0].lstrip("+").partition("=")[0] not in entries.groups], entries)
    _take_launcher(words, framework, entries)
    resolve(entries, dict(entries.environment))


_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")


def _program_of(words: list[tuple[str, int]]) -> Entry | None:
    """Returns the file or module that a command starts; torchrun's ``-m`` is a switch before other flags."""
    pairs = list(pairwise([("", 0), *words]))
    for at, ((flag, _), (word, line)) in enumerate(pairs):
        if flag == "-m" and word.startswith("-"):
            after = takewhile(lambda one: one[0].startswith("-") or "=" not in one[0], words[at:])
            modules = [Entry("", name, line) for name, line in after if _MODULE.fullmatch(name)]
            return modules[-1] if modules else None
        if flag == "-m" or (word.endswith(".py") and "=" not in word):
            return Entry("", word, line)
    return None


def _take_configuration_of_program(
    words: list[tuple[str, int]], path: Path, framework: Framework, entries: Entries
) -> None:
    """Takes the configuration that the source of a job's own program names, where both lie near the script."""
    named = _named_for_hydra(entries.program, path, framework, entries.started_in)
    if entries.program is None:
        return
    module = str(entries.program.value).removesuffix(".py").replace("/", ".")
    usual = next((name for one, name in framework.configuration_of.items() if module.endswith(one)), None)
    if usual is not None and usual in framework.configurations:
        _take_other_defaults(usual, entries.program, framework, entries)
    if named is None:
        return
    source, folder, name = named
    entries.add("config_name", name, entries.program.line)
    package = folder.removeprefix("pkg://").replace(".", "/") if folder.startswith("pkg://") else None
    folders = [source.parent / folder] if package is None else [up / package for up in path.absolute().parents]
    bases = [folder / f"{name}.yaml" for folder in folders]
    base = next((base for base in bases if is_file(base)), bases[0])
    if name in framework.configurations and not is_file(base):
        return
    if not is_file(base):
        entries.warnings.append(
            f"{entries.program.place}: the configuration {name}, which {source.name} names, is not in its folder "
            f"{shortened(folder)}, so memlab takes the framework's own defaults: put it there, or give its keys with "
            "--set"
        )
        return
    _take_configuration_file(base, words, framework, entries)


def _take_other_defaults(name: str, named_by: Entry, framework: Framework, entries: Entries) -> None:
    """Takes what one of the framework's own configurations has otherwise than the defaults of its keys."""
    for key, value in framework.configurations[name].items():
        entries.add(key, value, named_by.line)


def _take_file_in_source(path: Path, framework: Framework, entries: Entries) -> None:
    """Takes the file that a program of the framework reads where its command names none.

    Nothing is executed: its path is found in the program's source, if that lies near the script.
    """
    program = entries.program
    if framework.file_in_source is None or program is None:
        return
    source = _source_of(str(program.value), path)
    found = None if source is None else framework.file_in_source.search(_text(source)[0])
    base = None if source is None or found is None else source.parent.joinpath(*re.findall(r'"([^"]+)"', found[1]))
    example = framework.configuration_of.get(Path(str(program.value)).stem, "")
    if (base is None or not is_file(base)) and example in framework.examples:
        _take_missing_configuration(example, program, framework, entries)
        return
    if base is None or not is_file(base):
        entries.warnings.append(
            f"{program.place}: the command names no configuration, and the one that {Path(str(program.value)).name} "
            "reads then is not near the script, so memlab takes the framework's own defaults: give its keys with --set"
        )
        return
    entries.warnings.append(
        f"{program.place}: the command names no configuration, so {Path(str(program.value)).name} reads {base.name}"
    )
    own = _with_defaults(read_yaml(_text_of_configuration(base), base.name), base, []).of_file(base.name)
    entries.merge(own)
    entries.warnings += own.warnings


def _named_for_hydra(
    program: Entry | None, path: Path, framework: Framework, started_in: Path | None
) -> tuple[Path, str, str] | None:
    """Returns the source of a job's own program, if it lies near, and its configuration's folder and name.

    Nothing is executed: the decorator ``hydra.main`` is found in the text. The framework's own program counts where it
    lies in a checkout whose configurations are others than memlab's defaults.
    """
    if program is None or not framework.folder_of_configurations:
        return None
    source = _source_of(str(program.value), path if started_in is None else started_in / path.name)
    source = source or _source_of(str(program.value), path)
    if _is_of(framework, program) and (source is None or not framework.has_earlier_configurations(source)):
        return None
    if source is None:
        return None
    if (found := _HYDRA_MAIN.search(_text(source)[0])) is not None:
        return source, found[1], found[2]
    if (elsewhere := _HYDRA_MAIN_ELSEWHERE.search(_text(source)[0])) is None:
        return None
    top = source.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    folder = _folder_of_the_only(f"{elsewhere[1]}.yaml", top)
    return None if folder is None else (source, os.path.relpath(folder, source.parent), elsewhere[1])


def _folder_of_the_only(name: str, top: Path) -> Path | None:
    """Returns the folder of the one file of a name below another one; None where there are several, or none."""
    found, count = [], 0
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "_")) and one != "node_modules")
        found += [Path(folder)] if name in files else []
        count += len(files)
        if count > _MOST_FILES_SEARCHED:
            return None
    return found[0] if len(found) == 1 else None


def _source_of(program: str, path: Path) -> Path | None:
    """Returns the file of a program or module, if it lies near the script: below a folder that holds the script."""
    parts = program.removesuffix(".py").replace("/", ".").split(".")
    for up in path.absolute().parents:
        for first in range(len(parts) if up == path.absolute().parent else len(parts) - 1):
            source = up.joinpath(*parts[first:]).with_suffix(".py")
            if is_file(source):
                return source
        in_a_checkout = up.joinpath(parts[0], *parts).with_suffix(".py")
        if is_file(in_a_checkout):
            return in_a_checkout
    return None


def _folders_of_modules(paths: str) -> list[str]:
    """Returns the ends of the paths in PYTHONPATH, the longest first: their beginnings are those of another machine."""
    found = []
    for path in paths.split(":"):
        parts = [part for part in re.split(f"[/{UNKNOWN}]", path) if re.match(r"\w", part)]
        found += ["/".join(parts[start:]) for start in range(max(0, len(parts) - 3), len(parts))]
    return found


def _folder_of_program(program: Entry | None, names: list[str], path: Path) -> Path | None:
    """Returns the folder with the program among those to which a script goes, below one that holds the script."""
    if program is None:
        return None
    file = Path(str(program.value).removesuffix(".py").replace(".", "/")).with_suffix(".py")
    folders = (up / name for name in names if re.match(r"\w", name) for up in path.absolute().parents)
    return next((folder for folder in folders if is_file(folder / file)), None)


def _take_launcher(words: list[tuple[str, int]], framework: Framework, entries: Entries) -> None:
    """Takes the ranks from torchrun's flags, and the engine that an override of Hydra chooses, where they are read."""
    flags = Entries()
    read_flags([(word, line) for word, line in words if "=" not in word or word.startswith("--")], flags)
    for name in ("nnodes", "nproc_per_node"):
        entry = flags.by_key.get(name)
        if entry is not None and framework.knows(name):
            entries.by_key[name] = entry
    group = entries.by_key.pop("engine", None) if framework.name == "verl-sft" else None
    # Hydra sets the key after it has chosen the group's file.
    if group is not None and "engine.strategy" not in entries.by_key:
        entries.add("engine.strategy", group.value, group.line)


def _take_environment_of_ray(command: Command, path: Path, entries: Entries) -> None:
    """Takes the ``env_vars`` of the file that ``ray job submit --runtime-env`` names (Ray 2.x), above the script's."""
    for (before, _), (word, line) in pairwise(command.words):
        if before != "--runtime-env" and not word.startswith("--runtime-env="):
            continue
        root = _argument_file(
            word.removeprefix("--runtime-env="), line, path, entries, "the file with variables for Ray"
        )
        if root is not None and isinstance(root.value, dict):
            entries.environment = entries.environment | texts_of(root.value.get("env_vars"))


def _argument_file(
    name: str, line: int, path: Path, entries: Entries, what: str = "the file of arguments"
) -> Node | None:
    """Reads a file of arguments, named from the script's folder or from one above it, where the job may be started.

    Args:
        name: As the command has it.
        entries: They get a warning if the file is not there.
        what: What a user calls it.

    Returns:
        Its root, or None.
    """
    bases = [folder / name for folder in path.absolute().parents]
    base = next((one for one in bases if UNKNOWN not in name and is_file(one)), None)
    if base is None:
        shown = "" if UNKNOWN in name else f" {shortened(name)}"
        entries.warnings.append(
            f"line {line}: {what}{shown} is not beside the script, so what it sets is unknown: put it "
            "there, or give its keys with --set"
        )
        return None
    return read_yaml(_text_of_configuration(base).replace("\t", " "), base.name)  # JSON is YAML


def _chosen(script: Script, framework: str, warnings: list[str]) -> Command | None:
    """Returns the command of a framework with the most arguments, and warns where the script starts others too."""
    own = [one for one in script.commands if framework_of_commands([[word for word, _ in one.words]]) == framework]
    by_words = {
        tuple(word for word, _ in one.words): one
        for one in reversed(own or script.commands)
        if own or _score(one, framework)
    }
    if not by_words:
        return None
    found = list(reversed(by_words.values()))
    chosen = max(found, key=lambda command: (_score(command, framework), command.is_certain))
    if len(found) > 1:
        warnings.append(
            f"{lines_of(command.line for command in found)}: the script starts {framework if own else 'programs'} with "
            f"{len(found)} different commands; memlab takes the one of line {chosen.line}, which has the most "
            "arguments: if you mean another one, leave this one out of the script"
        )
    if not chosen.is_certain:
        warnings.append(
            f"line {chosen.line}: memlab cannot decide whether the script runs this command, and reads it nevertheless"
        )
    return chosen


def _score(command: Command, framework: str) -> int:
    if framework_named(framework).style == "flags":
        return sum(word.startswith("--") for word, _ in command.words)
    return sum("=" in word and "." in word.partition("=")[0] for word, _ in command.words)
