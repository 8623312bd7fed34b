"""What each framework's module provides, and what reading a job's file collects."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from memlab.config.architectures import Architecture
from memlab.config.hugging_face import model_name
from memlab.config.option import EngineName, options_of
from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError, shortened
from memlab.config.versions import Versions
from memlab.jobs.entries import UNKNOWN, Entries, Entry
from memlab.jobs.frameworks.keys import ABSENT, NOT, SWITCH, TEXT, Blocked, Conversion, Effect, Key, Missing, refusal
from memlab.jobs.frameworks.without_effect import has_no_effect
from memlab.jobs.yaml_tree import ReadFile

Style = Literal["flags", "overrides"]
_MAY_BE_NONE = {*(one.name for one in fields(MemorySettings)), *options_of(TrainingState)}


class CannotStartError(RuleError):
    """The framework itself would refuse the job; the text says by which rule."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A key that memlab used."""

    key: str
    value: Any
    field: str
    memlab_value: Any
    place: str
    """``line 14``, ``--set``, or ``default``."""


@dataclass(frozen=True, slots=True)
class NotModelled:
    """A key that changes memory in a way that memlab does not predict."""

    key: str
    value: Any
    effect: Effect
    reason: str
    place: str = ""
    bound_bytes: int | None = None
    """How much it changes at most on a rank, where that is known; of what freezes parameters, only gradients and
    optimizer state."""
    most_micro_batches: int | None = 0
    """As in `Reading`."""


PaddingInFp8 = Callable[[int, int, str], tuple[int, int]]
"""What sequences, and rows of packed sequences, are padded to a multiple of: it is given what the ranks of a sequence
need, how many of them context parallelism has, and the recipe."""


@dataclass(slots=True)
class Reading:
    """A job's file on the way to a scenario."""

    path: Path
    entries: Entries
    version: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """By memlab's field, and by the few names of `Key.field` that only the framework's module knows."""
    taken: list[Taken] = field(default_factory=list)
    not_modelled: list[NotModelled] = field(default_factory=list)
    without_effect: dict[str, str] = field(default_factory=dict)
    """Keys that memlab knows and that change nothing here, each with the reason."""
    blocked: defaultdict[Blocked, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Why memlab cannot predict the job, in phrases, by what it does not have."""
    lacks: list[str] = field(default_factory=list)
    """As in `Job`."""
    warnings: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    """What the user has to decide before memlab can predict the job, in whole sentences."""
    architecture: Architecture | None = None
    """The model, where the file writes out its configuration."""
    rollout: Rollout | None = None
    """What a job of reinforcement learning does between training steps."""
    most_micro_batches: int | None = 0
    """As many as a copy has in a step, where memlab predicts fewer; None if the job does not say how many, 0 if memlab
    predicts all."""
    micro_batches: tuple[int, int] | None = None
    """The fewest and the most that a copy has in a step, where the data decides; None where that is not known."""
    padding_in_fp8: PaddingInFp8 | None = None
    """As in `Framework`."""
    known: set[str] = field(default_factory=set)
    """Keys that memlab has understood."""
    unread: str = ""
    """What sets values of the job that memlab cannot read, such as a recipe; nothing where it reads them all."""
    other_program: str = ""
    """What the job starts in place of the framework's own program, in a phrase: it may have other rules."""
    guessed: list[str] = field(default_factory=list)
    """Keys that are known only when the job runs, for which memlab takes the defaults; no names, such as a path."""

    not_given: list[str] = field(default_factory=list)
    """Such keys that `get` has taken as not given since the framework's rules are checked."""

    assumed: list[str] = field(default_factory=list)
    """What the file does not say at all, and memlab takes an example for, with a warning: ranks, lengths."""
    kept_of_parameter: dict[str, int] = field(default_factory=dict)
    """Bytes by category that all ranks of FSDP2 together keep at least of each parameter of the model while the
    optimizer updates it; empty where that is not known."""

    @property
    def started(self) -> Path:
        """Where the job's file would be in the folder in which its command is started."""
        return self.path if self.entries.started_in is None else self.entries.started_in / self.path.name

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key that only this framework has, and counts it as understood.

        A value that is known only when the job runs counts as not given, and a warning says so once.
        """
        entry = self.entries.by_key.get(key)
        if entry is not None and entry.is_unknown:
            self.not_given.append(key)
            if key not in self.known:
                self.warn_of_unknown(entry, "it as not given")
        self.known.add(key)
        return self.entries.get(key, default)

    def converted(self, key: str, conversion: Conversion) -> Any:
        """Returns memlab's value of a key that the table cannot express; None where it is not given.

        Raises:
            ValueError: If it is of another kind, with its line.
        """
        value = self.get(key)
        return None if value is None else conversion.checked(self.entries.by_key[key].place, key, value)

    def take(self, key: str, field_name: str, value: Any) -> None:
        """Sets a field from a key that the table cannot express."""
        self.known.add(key)
        self.values[field_name] = value
        entry = self.entries.by_key.get(key)
        place = "default" if entry is None else entry.place
        self.taken.append(Taken(key, None if entry is None else entry.value, field_name, value, place))

    def warn_of_unknown(self, entry: Entry, taken: str) -> None:
        """Says what memlab takes for a value that is known only when the job runs."""
        self.warnings.append(
            f"{entry.place}: {entry.key} is known only when the job runs, so memlab takes {taken}: give it with --set "
            f"{entry.key}=VALUE"
        )

    def take_back(self, field_name: str, reason: str = "") -> list[str]:
        """Takes no key for a field after all, and returns the keys that there were; its value stays.

        Args:
            field_name: Of memlab, or as in `Key.field`.
            reason: Why the keys have no effect; without one, the caller says what becomes of them.
        """
        dropped = [one for one in self.taken if one.field == field_name]
        self.taken = [one for one in self.taken if one.field != field_name]
        self._note_without_effect(dropped, reason)
        return [one.key for one in dropped]

    def model(self, keys: Callable[[str], bool], reason: str = "") -> None:
        """Counts keys as modelled after all; with a reason, as keys without effect."""
        dropped = [one for one in self.not_modelled if keys(one.key)]
        self.not_modelled = [one for one in self.not_modelled if not keys(one.key)]
        self._note_without_effect(dropped, reason)

    def _note_without_effect(self, dropped: Iterable[Taken | NotModelled], reason: str) -> None:
        """Gives keys a reason, if there is one; what the file does not say is nowhere then."""
        self.without_effect |= {one.key: reason for one in dropped if reason and one.place != "default"}

    def miss(self, key: str, effect: Effect, reason: str) -> None:
        """Notes that something of the job is not modelled."""
        self.known.add(key)
        entry = self.entries.by_key.get(key)
        value, place = (None, "default") if entry is None else (entry.value, entry.place)
        self.not_modelled.append(NotModelled(key, value, effect, reason, place))


def flags_of(words: Iterable[str]) -> set[str]:
    """Returns the flags of a command, without their values."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """By what memlab recognizes the jobs of a framework."""

    looked_for: str
    """In a phrase, for whoever has a file that memlab does not recognize."""
    programs: tuple[str, ...] = ()
    """Modules that are started, also by their files, and that no other framework has."""
    key: str = ""
    """How one of its keys begins in each of its configurations and overrides."""
    of_command: Callable[[list[str]], bool] = lambda _: False
    """Whether the words of a command are those of a job."""
    of_tree: Callable[[Callable[[str], bool]], bool] = lambda _: False
    """Whether a configuration is a job's; it is given a function that says whether a key begins so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework: its table of keys, and what a table cannot express."""

    name: str
    """As ``--format`` and ``--as`` take it."""
    title: str
    source: str
    """The versions whose names and defaults the table has."""
    transformer_engine: str = Versions().transformer_engine
    """The release of Transformer Engine that the framework's own images or requirements install with that version; the
    usual one where they name none."""
    signs: Signs
    style: Style
    """Whether its scripts have ``--flags value`` or ``key=value``."""
    flags_are_overrides: bool = False
    """Whether ``--key value`` says the same as ``key=value``."""
    keys: tuple[Key, ...]
    missing: tuple[Missing, ...]
    without_effect: frozenset[str]
    """Keys that do not change the memory of a training step (`keys_without_effect`)."""
    take_files: Callable[[list[tuple[str, int]], Entries, ReadFile], None] = lambda *_: None
    """Takes what the files say that the flags of a command name. It gets the words behind the program, each with its
    line, and the entries of the flags."""
    complete: Callable[[Reading], None]
    """Derives what several keys decide together."""
    complete_of_model: Callable[[Reading, Architecture], None] = lambda *_: None
    """Derives what the model decides too, once it is known."""
    complete_refused: Callable[[Reading], None] = lambda _: None
    """Of a job that memlab cannot predict: names what `complete_of_model` would have."""
    check: Callable[[Reading], None] = lambda _: None
    """Raises `CannotStartError` by a rule of the framework's own; those of Megatron-Core hold in every framework."""
    compose: Callable[[Scenario, MemorySettings], dict[str, Any]] = lambda *_: {}
    """Returns the values by `Key.field` that the fields of memlab become; the opposite of `complete`."""
    cannot_write: dict[str, str] = field(default_factory=dict)
    """Fields of memlab that the framework cannot express, each with the reason."""
    cannot_write_of: Callable[[Scenario, MemorySettings], dict[str, str]] = lambda *_: {}
    """The same, where it depends on other fields too."""
    without_own_key: frozenset[str] = frozenset()
    """Fields of memlab that no key stands for alone: `compose` writes them, or `cannot_write_of` names them."""
    render: Callable[[dict[str, Any]], list[str]] = lambda _: []
    """Writes keys and values as lines to paste; a key with the value `ABSENT` is to be removed."""
    packs: Callable[[Scenario], bool] = lambda _: False
    """Whether the framework's budget of tokens makes a scenario's packed rows."""
    written_with: dict[str, str] = field(default_factory=dict)
    """Fields, each with another whose key is written beside its own, since it has another default there."""
    writes_sizes: bool = False
    """Whether its lines give the sizes of the model, beside the model's name."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of memlab that the framework decides by itself, whatever its keys say, each with the value; among them the
    ``engine`` of its jobs, where that is not Megatron."""
    leaves_out: Callable[[Any], bool] = lambda _: False
    """Whether leaving the key out expresses a value, as false for a switch of a command line."""
    switches: tuple[str, ...] = ()
    """Flags without a value that are in no row of `keys`."""
    padding_in_fp8: PaddingInFp8 | None = None
    """What a sequence and a row of packed sequences are padded to a multiple of in FP8."""
    decided_by: tuple[str, ...] = ()
    """Of a second model that a job trains: the keys that say whether it does."""
    own_entries: Callable[[Entries], Entries] = lambda entries: entries
    """Of a second model whose section has the keys of the first one's: the entries of a job that has it alone."""
    is_teacher: bool = False
    """Of a second model: whether it has passes between the first one's steps, and is not trained."""
    value_of: Callable[[Any], Any] = lambda value: value
    """Returns what the framework's own reader makes of a value, where it turns texts into others."""
    as_in_file: Callable[[str], str] = str
    """Gives the keys in a text the names that they have in the file."""
    configurations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Names of the framework's own configurations, each with the keys whose values are other ones than the defaults of
    `keys`."""
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same of configurations in the framework's repository from which users start jobs; memlab takes these only
    where the file itself is not there."""
    folder_of_configurations: str = ""
    """Where a checkout has them."""
    configuration_of: dict[str, str] = field(default_factory=dict)
    """Of the framework's own programs, which of these they read where a command names none."""
    file_in_source: re.Pattern[str] | None = None
    """Finds, in the source of a program, the path of the file that it reads where a command names none: the names of
    folders below its own, and the file's, in quotes."""
    versions: tuple[str, ...] = ()
    """Among which the user has to choose where defaults differ; the newest first."""
    version_around: Callable[[Path], tuple[str, str] | None] = lambda _: None
    """Returns which of `versions` the checkout has that a job's file lies in, and what says so."""
    has_earlier_configurations: Callable[[Path], bool] = lambda _: False
    """Whether a file lies in a checkout whose own configurations have other defaults than `keys`."""

    @property
    def engine(self) -> EngineName:
        """The training engine of its jobs."""
        return self.fixed.get("engine", "megatron")  # type: ignore[no-any-return]

    def read(self, reading: Reading) -> None:
        """Reads all keys of a job's file.

        Raises:
            ValueError: If a value is of another kind than the key's, with its line, or if there is no such version.
        """
        self._check_version(reading.version)
        reading.padding_in_fp8 = self.padding_in_fp8
        by_key = reading.entries.by_key
        by_key |= {name: replace(entry, value=self.value_of(entry.value)) for name, entry in by_key.items()}
        present: set[str] = set()
        calculated = {key.field for key in self.keys if type(key.default) is int} - _MAY_BE_NONE
        for key in self.keys:
            entry = reading.entries.by_key.get(key.name)
            if entry is None:
                continue
            reading.known.add(key.name)
            if entry.is_unknown and key.field in _NAMES_A_MODEL:
                entry = replace(entry, value=_known_end(entry.value))
            if entry.is_unknown:
                reading.warn_of_unknown(entry, "the default")
                if key.conversion is not TEXT:
                    reading.guessed.append(key.name)
                continue
            value = key.conversion.checked(entry.place, key.name, entry.value)
            if value is None and key.field in calculated:  # by `complete`, which needs a number
                if key.default is ABSENT:
                    continue  # the field's other key has the default
                value = key.default
            present.add(key.field)
            reading.values[key.field] = value
            reading.taken.append(Taken(key.name, entry.value, key.field, value, entry.place))
        for key in self.keys:
            if key.field not in present and key.default is not ABSENT:
                reading.values.setdefault(key.field, key.default)
                written = key.conversion.write(key.default)
                reading.taken.append(Taken(key.name, written, key.field, key.default, "default"))
                present.add(key.field)
        reading.values |= self.fixed
        self._note_missing(reading)
        self.complete(reading)

    def _check_version(self, version: str | None) -> None:
        if version is None or version in self.versions:
            return
        rule = f"must be {' or '.join(self.versions)} for {self.title}: choose one"
        if not self.versions:
            rule = f"but memlab has the keys of one version of {self.title} ({self.source}): leave it out"
        raise ValueError(f"--framework-version is {shortened(version)}, {rule}")

    def _note_missing(self, reading: Reading) -> None:
        for missing in self.missing:
            entry = reading.entries.by_key.get(missing.name)
            if entry is not None:
                reading.known.add(missing.name)
            if entry is not None and entry.is_unknown:
                reading.warn_of_unknown(entry, "it as not given")
                continue
            value, place = (missing.default, "default") if entry is None else (entry.value, entry.place)
            if value is ABSENT or value == {}:
                continue
            try:
                is_on = missing.is_on(value)
            except ValueError as error:
                raise refusal(place, missing.name, value, error) from error
            if not is_on:
                continue
            reading.not_modelled.append(NotModelled(missing.name, value, missing.effect, missing.reason, place))
            start = missing.name[: missing.name.rfind(".") + 1]
            for key in reading.entries.by_key if missing.parts else ():
                if key.startswith(tuple(start + name for name in missing.parts)):
                    reading.miss(key, missing.effect, f"it is a part of {missing.name}")
            if missing.blocks:
                reading.blocked[missing.of].append(f"{missing.name} {value} ({place}): {missing.reason}")

    def ignores(self, key: str) -> bool:
        """Whether a key is known to change no memory of a training step."""
        return has_no_effect(key, self.without_effect)

    def names(self) -> set[str]:
        """Returns the names of all keys that memlab reads or knows to change memory."""
        return {key.name for key in self.keys} | {missing.name for missing in self.missing}

    def knows(self, key: str) -> bool:
        """Whether memlab knows a key, or keys that it holds."""
        return self.ignores(key) or any(name == key or name.startswith(f"{key}.") for name in self.names())

    def is_switch(self, flag: str) -> bool | None:
        """Whether a flag has no value; None if memlab does not know that."""
        for key in self.keys:
            if key.name == flag:
                return key.conversion in (SWITCH, NOT) and self.leaves_out(False)
        if flag in self.switches:
            return True
        return False if any(flag == missing.name for missing in self.missing) else None


_NAMES_A_MODEL = ("architecture", "loaded")


def _known_end(value: Any) -> Any:
    """Returns the model's name in a path whose folder is known only when the job runs, such as ``${FOLDER}/phi-4``."""
    name = model_name(str(value))
    return name if name != value and UNKNOWN not in name else value
