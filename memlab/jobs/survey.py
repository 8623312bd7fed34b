"""How much of the job files below a folder, such as a framework's checkout, memlab reads and can predict."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from memlab.config.architectures import published_architecture
from memlab.config.hugging_face import model_name
from memlab.config.validation import shortened
from memlab.jobs.bounds import changes_the_step
from memlab.jobs.bridge_package import recipes_in
from memlab.jobs.entries import NoJobError
from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.frameworks.registry import FRAMEWORKS, TABLES
from memlab.jobs.job import Job
from memlab.jobs.other_models import other_model

Outcome = Literal["expressible", "bounded", "unbounded", "asked", "read", "refused", "cannot start", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""``expressible``: nothing of the training is left out. ``bounded``: of all that is left out memlab knows how much it
changes at most. ``unbounded``: of something it does not, or it takes a default in place of what only the job knows.
``asked``: memlab needs a value that the file does not have. ``read``: memlab understood all keys, and does not have the
model, a kind of layer, or the engine; of some it knows the least that a rank keeps. ``refused``: the same, with keys
that it does not know. ``cannot start``: the framework itself would refuse the job. ``failed``: a fault of memlab."""
_ENDINGS = frozenset({".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".json", ".toml"})
_WITH_RECIPES = ("recipes", "perf_recipes")
"""Folders of Megatron-Bridge whose programs are recipes."""
_GENERIC = ("enable", "enabled", "mode", "rank", "target", "type", "method", "model", "dtype")
"""Ends of keys that say nothing without their section."""
_MODEL = re.compile(r"[a-z]+[-_ ]?[\d.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedFile:
    """What memlab makes of one job's file."""

    path: str
    """Below the folder."""
    framework: str
    """Empty where memlab failed before it knew."""
    model: str
    """The family of a known model, the beginning of another one's name, or ``not named``."""
    outcome: Outcome
    missing: tuple[str, ...]
    """What is not modelled, what memlab does not have, or what it asks for."""
    least_bytes: int | None = None
    """Of a job that memlab refuses: what the rank that keeps the most has at least while the optimizer updates it; None
    where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All job files below a folder, in the order of their paths."""

    folder: str
    num_files: int
    """Files with the ending of a script or a configuration, jobs or not."""
    files: tuple[SurveyedFile, ...]
    unreadable: dict[str, str]
    """By the path of a file that may be a job's, why it cannot be read."""

    def counts(self, kind: Literal["framework", "model"]) -> dict[str, dict[Outcome, int]]:
        """Returns how many jobs have each outcome, by framework or by model; the most frequent first."""
        names = Counter(getattr(one, kind) for one in self.files)
        found = Counter((getattr(one, kind), one.outcome) for one in self.files)
        return {name: {outcome: found[name, outcome] for outcome in OUTCOMES} for name, _ in names.most_common()}

    def missing(self) -> dict[str, int]:
        """Returns in how many jobs each thing is missing; the most frequent first."""
        return dict(Counter(name for one in self.files for name in one.missing).most_common())

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return asdict(self) | {
            "by_framework": self.counts("framework"),
            "by_model": self.counts("model"),
            "missing": self.missing(),
        }


def survey(
    folder: Path, *, version: str | None = None, on_file: Callable[[int, int], None] = lambda *_: None
) -> Survey:
    """Reads every job's file below a folder, and executes none.

    Args:
        folder: Hidden folders below it are left out, and links are not followed.
        version: Of the frameworks that have such a version, where their defaults depend on it.
        on_file: Is called before each file, with its number from 1 and the number of all.

    Raises:
        ValueError: If it is no folder, or no framework has such a version.
    """
    versions = {one for framework in FRAMEWORKS.values() for one in framework.versions}
    if version is not None and version not in versions:
        raise ValueError(
            f"--framework-version is {shortened(version)}, which no framework has: give one of "
            f"{', '.join(sorted(versions))}"
        )
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{shortened(folder)} {what}: give a folder with job files, such as a checkout")
    files, unreadable = list[SurveyedFile](), dict[str, str]()

    def note(error: OSError) -> None:
        unreadable[str(Path(error.filename).relative_to(folder))] = f"{error.strerror}: nothing in it was read"

    paths = sorted(_jobs(_files(folder, note)))
    for number, path in enumerate(paths, start=1):
        on_file(number, len(paths))
        name = str(path.relative_to(folder))
        try:
            job = Job.read(path)
            if version in TABLES[job.framework].versions:
                job = Job.read(path, version=version)
            files.append(_surveyed(name, job))
        except NoJobError:
            continue
        except ValueError as error:
            unreadable[name] = str(error)
        except Exception as error:  # noqa: BLE001  a fault of memlab, which is told and does not end the walk
            fault = f"{type(error).__name__}: {error}"
            files.append(SurveyedFile(path=name, framework="", model="", outcome="failed", missing=(fault,)))
    return Survey(folder=str(folder), num_files=len(paths), files=tuple(files), unreadable=unreadable)


def _jobs(files: Iterable[Path]) -> Iterator[Path]:
    """Yields files, and of a file with recipes each recipe."""
    for file in files:
        if file.suffix != ".py":
            yield file
        else:
            yield from (file.with_name(f"{file.name}::{name}") for name in recipes_in(file))


def _files(folder: Path, unread: Callable[[OSError], None]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=unread):
        folders[:] = [name for name in folders if not name.startswith(".")]
        has_recipes = not set(Path(parent).resolve().parts).isdisjoint(_WITH_RECIPES)
        endings = {*_ENDINGS, ".py"} if has_recipes else _ENDINGS
        yield from (Path(parent, name) for name in names if Path(name).suffix in endings)


def _surveyed(name: str, job: Job) -> SurveyedFile:
    outcome, missing = _outcome(job)
    return SurveyedFile(
        path=name,
        framework=job.framework,
        model=_model(job),
        outcome=outcome,
        missing=tuple(dict.fromkeys(missing)),
        least_bytes=sum(job.at_least.values()) or None,
    )


def _outcome(job: Job) -> tuple[Outcome, list[str]]:
    if job.cannot_start is not None:
        names = ", ".join(name.rpartition(".")[2] for name in job.refused_fields)
        return "cannot start", [f"starts only with other values of {names or 'its keys'}"]
    if job.lacks:
        knows_all = all(one.effect != "unknown" for one in job.not_modelled)
        return "read" if knows_all else "refused", list(job.lacks)
    unknown = [question.partition(":")[0] for question in job.questions]
    unknown += [f"the file does not say {guess}" for guess in job.guesses]
    if job.scenario is None:
        return ("asked", unknown) if unknown else ("refused", [str(job.not_supported)])
    rows = [one for one in job.not_modelled if one.bound_bytes != 0 and changes_the_step(one.key)]
    missing = [*unknown, *(["a correct file"] if job.causes else []), *map(_named, rows)]
    if not missing:
        return "expressible", []
    is_bounded = len(rows) == len(missing) and all(one.bound_bytes is not None for one in rows)
    return "bounded" if is_bounded else "unbounded", missing


def _named(one: NotModelled) -> str:
    section, _, name = one.key.rpartition(".")
    if name in _GENERIC:
        name = f"{section.rpartition('.')[2]}.{name}".removeprefix(".")
    if one.effect == "unknown":
        return f"{name}: memlab does not know the key"
    return f"{name}{'' if one.bound_bytes is not None else ', without a bound'}"


def _model(job: Job) -> str:
    names = [str(one.memlab_value) for one in job.taken if one.field == "architecture" and one.memlab_value]
    if not names:
        return "not named"
    known = published_architecture(names[-1])
    if known is not None:
        return known.family
    other = other_model(names[-1])
    if other is not None:
        return other.family
    start = _MODEL.match(model_name(names[-1]).lower())
    return start[0].rstrip("-_ .") if start else "not named"
