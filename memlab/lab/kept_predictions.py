"""Predictions on disk: what one search has predicted, no later one has to predict again.

A predicted step depends on what is run, under which settings, and on the code that predicts it. It depends on nothing
else (`memlab.lab.search_steps.SimulatedSteps`). So what was seen of it is kept under a digest of all these: every field
of its scenario and its settings, what its job does and memlab does not model, the sources of memlab, Megatron, torch
and other packages, the installed versions, and the variables of the environment that these packages read. A value of a
type that is not known here has no digest, and its step is not kept.

The limit is not a part of the digest: a step is taken without one, and is judged again by each limit that is asked for.
Only where the step reserves more than the limit does the answer depend on its requests, which are not kept. Then the
step is taken again, and its answer for this limit is kept too.

A file appears whole or not at all, and has a digest of its name and content. Where the folder cannot be written,
nothing is kept.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from memlab.atomic_files import written_aside
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import Steps, completes_in_any_case
from memlab.fitting.peak_range import PeakRange
from memlab.fitting.prediction import Prediction, Seen
from memlab.jobs.frameworks.framework import NotModelled
from memlab.quiet_import import MEMLAB_IMPORTED_NS
from memlab.record.step_record import StepRecord

FOLDER_VARIABLE = "MEMLAB_PREDICTIONS"
"""Names the folder. With an empty value, nothing is kept."""
_MOST_FILES = 20_000
"""About 60 MB. A search for settings keeps 40 to 200."""
BACKEND = "simulated"
"""The only one whose steps are kept: what others predict may depend on this machine's processor."""
_CHANGING = ("memlab", "megatron.core")
"""Packages that somebody may change while a search runs."""
_PACKAGES = (*_CHANGING, "torch", "transformer_engine", "transformers", "peft", "numpy")
_VARIABLES = (
    *("CUDA_", "CUBLAS", "MEMLAB_", "NCCL_", "NVTE_", "NVIDIA_", "PYTORCH_", "TORCH", "TRANSFORMERS_"),
    "USE_HUB_KERNELS",  # of transformers too
)
"""How the names begin of the variables that these packages read."""
_WITHOUT_EFFECT = {FOLDER_VARIABLE, "CUDA_VISIBLE_DEVICES"}
_OWN_NAME = re.compile(r"[0-9a-f]{64}[.]json|[.]memlab-[0-9a-f]{8}[.]json")
"""Of a kept step, and of what a process left that was killed while it wrote one."""
_PLAIN = (str, int, float, bool, bytes, type(None))
_LEFT_OUT = {"scenario", "settings", "versions", "hardware", "peak_by_module", "out_of_memory"}
"""Of a record: what is asked for, and what no prediction contains."""


@dataclass(frozen=True, slots=True)
class KeptPredictions:
    """The predictions of one version of the code.

    Args:
        environment: Digest of what decides about predicted steps beside what is asked for.
        changing: Digest of the packages that may change while a search runs.
    """

    folder: Path
    environment: str
    changing: str

    @classmethod
    def here(cls, say: Callable[[str], object]) -> Self | None:
        """Returns those of this user; None if there is no folder for them.

        None too if a source has changed since this process, such as a notebook's, imported memlab: it may have loaded
        the former one.

        Args:
            say: Called with a line that names such a source.
        """
        folder, sources = _folder(), _sources(_PACKAGES)
        if folder is None:
            return None
        if newer := [path for path, *_, placed_ns in sources if placed_ns > MEMLAB_IMPORTED_NS]:
            say(f"predictions of other searches are neither used nor kept: {newer[0]} is newer than this process")
            return None
        read = sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))
        variables = [each for each in read if each[0] not in _WITHOUT_EFFECT]
        changing, files = _sources(_CHANGING), [source[:-1] for source in sources]
        python = sys.version, sys.flags.optimize, platform.platform()
        code = python, _installed(), files, _content_of(changing), variables
        return cls(folder, _digest(code), _digest(changing))

    def prediction(
        self,
        scenario: Scenario,
        settings: MemorySettings,
        limit_bytes: int,
        not_modelled: Sequence[NotModelled] = (),
    ) -> Prediction | None:
        """Returns a prediction that was kept; None if there is none, or none that says whether it fits the limit."""
        path = self._path(scenario, settings, not_modelled)
        kept = None if path is None else _read(path)
        if path is None or kept is None:
            return None
        record = StepRecord(
            scenario=scenario, settings=settings, versions={}, peak_by_module={}, timeline=None, **kept["record"]
        )
        seen = Seen(
            record=record,
            peak_range=PeakRange.from_dict(kept["peak_range"]),
            requested_at_peak=kept["requested_at_peak"],
            communicated_bytes=kept["communicated_bytes"],
        )
        try:
            prediction = Prediction.judged(seen, _KeptAnswers(kept["completes"]), limit_bytes)
        except _NotKeptError:
            return None
        with suppress(OSError):
            os.utime(path)  # those that nobody has asked for longest are removed first
        return prediction

    def keep(self, seen: Seen, not_modelled: Sequence[NotModelled], completes: Mapping[int, bool]) -> None:
        """Keeps what was seen of a step that finished.

        A search may run while somebody edits the code. So nothing is kept once the sources differ from those with which
        the search began.

        Args:
            completes: Whether it completes within limits that were asked for.
        """
        record = seen.record
        path = self._path(record.scenario, record.settings, not_modelled)
        if path is None or record.status != "ok" or _digest(_sources(_CHANGING)) != self.changing:
            return
        earlier = _read(path)
        answers = {} if earlier is None else earlier["completes"]
        values = replace(record, timeline=None).to_dict()
        kept = {
            "record": {name: value for name, value in values.items() if name not in _LEFT_OUT},
            "peak_range": seen.peak_range.to_dict(),
            "requested_at_peak": dict(seen.requested_at_peak),
            "communicated_bytes": dict(seen.communicated_bytes),
            "completes": answers | {str(limit): answer for limit, answer in completes.items()},
        }
        content = json.dumps(kept).encode()
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with written_aside(path) as aside:
                aside.write_bytes(_seal(path, content) + b"\n" + content)

    def shorten(self) -> None:
        """Removes kept steps that nobody has asked for longest, if there are too many; other files stay."""
        with suppress(OSError):
            files = [path for path in self.folder.iterdir() if _OWN_NAME.fullmatch(path.name)]
            if len(files) > _MOST_FILES:
                files.sort(key=lambda path: path.stat().st_mtime_ns)
                for path in files[: len(files) - _MOST_FILES * 3 // 4]:
                    path.unlink(missing_ok=True)

    def _path(self, scenario: Scenario, settings: MemorySettings, not_modelled: Sequence[NotModelled]) -> Path | None:
        try:
            asked = canonical((scenario, settings, tuple(not_modelled)))
        except TypeError:
            return None
        return self.folder / f"{_digest((self.environment, asked))}.json"


class NotedAnswers:
    """Notes whether a step completes within the limits that are asked for."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.answers: dict[int, bool] = {}

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        """Takes a step."""
        return self._steps(settings, limit_bytes)

    def completes(self, record: StepRecord, limit_bytes: int) -> bool:
        """Implements `memlab.fitting.does_it_fit.Steps.completes`."""
        self.answers[limit_bytes] = answer = self._steps.completes(record, limit_bytes)
        return answer


class _NotKeptError(Exception):
    """It is not known whether a step completes within a limit."""


class _KeptAnswers:
    def __init__(self, answers: Mapping[str, bool]) -> None:
        self._answers = answers

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        raise _NotKeptError

    def completes(self, record: StepRecord, limit_bytes: int) -> bool:
        if completes_in_any_case(record, limit_bytes):
            return True
        answer = self._answers.get(str(limit_bytes))
        if answer is None:
            raise _NotKeptError
        return answer


def canonical(value: Any) -> str:
    """Returns a text that is equal only for equal values of equal types.

    Raises:
        TypeError: For a value of which that is not known.
    """
    kind = type(value)
    if kind in _PLAIN:
        return f"{kind.__name__}:{value!r}"
    parts: Iterable[str]
    if is_dataclass(value):
        parts = (f"{each.name}={canonical(getattr(value, each.name))}" for each in fields(value))
    elif kind is dict:
        parts = (f"{canonical(key)}:{canonical(each)}" for key, each in value.items())
    elif kind in (tuple, list):
        parts = map(canonical, value)
    elif kind in (set, frozenset):
        parts = sorted(map(canonical, value))
    else:
        raise TypeError(f"{kind.__name__} has no canonical text")
    return f"{kind.__module__}.{kind.__qualname__}({','.join(parts)})"


def _folder() -> Path | None:
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111  # that of Path raises
    return cache / "memlab" / "predictions" if cache.is_absolute() else None


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the content of a file; None if there is none, or it is damaged."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if _seal(path, content) != digest:
        return None
    kept: dict[str, Any] = json.loads(content)
    return kept


def _seal(path: Path, content: bytes) -> bytes:
    return sha256(path.name.encode() + content).hexdigest().encode()


def _installed() -> list[str]:
    """Returns the names and versions of all installed packages, as their installers have noted them."""
    found: list[str] = []
    for folder in sys.path:
        with suppress(OSError):
            names = [path.name for path in Path(folder).iterdir()]
            found += [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    return sorted(found)


def _sources(packages: Iterable[str]) -> list[tuple[str, int, int, int]]:
    """Returns each source file of packages that are installed: its path, size, and when it was changed and placed.

    Compiled modules count too. A file that is unpacked, copied or renamed may be said to have changed long before it
    was placed.
    """
    folders = [folder for name in packages for folder in _folders_of(name)]
    return sorted(each for folder in folders for each in _files_in(folder, set()))


def _content_of(sources: Iterable[tuple[str, int, int, int]]) -> str:
    """Returns a digest of what files contain, which in rebuilt images may differ where size and time do not."""
    content = sha256()
    for name, *_ in sources:
        with suppress(OSError):
            content.update(sha256(Path(name).read_bytes()).digest())
    return content.hexdigest()


def _folders_of(package: str) -> Sequence[str]:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # the latter for a stand-in that somebody has put in its place
        return ()
    return () if spec is None else list(spec.submodule_search_locations or ())


def _files_in(folder: str, followed: set[str]) -> Iterator[tuple[str, int, int, int]]:
    """Yields the files of `_sources` below a folder, also where links lead, to each place once."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir():
            place = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
            if entry.name != "__pycache__" and place not in followed:
                followed.add(place)
                yield from _files_in(entry.path, followed)
        elif entry.name.endswith((".py", ".so", ".pyd", ".json")):
            with suppress(OSError):  # of a link to nothing, which an editor makes beside a file that is being changed
                state = entry.stat()
                yield entry.path, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _digest(value: Any) -> str:
    return sha256(repr(value).encode()).hexdigest()
