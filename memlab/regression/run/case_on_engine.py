"""A case that runs on an engine, which may be on another machine: what the engine does, and how the nightly asks it."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.regression.run.runner import LabFailedError, PreparedLab

if TYPE_CHECKING:
    from memlab.ranks.balanced import Balanced
    from memlab.ranks.ranks import Engine

SERVED = "memlab.regression.run.case_on_engine:CaseOnEngine"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ended:
    folder: Path
    failure: str = ""


class CaseOnEngine:
    """Runs one case at a time, and reports its progress to the nightly: the object that an engine's process serves."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        self._report = report

    def run(self, lab: PreparedLab) -> _Ended:
        """Runs a case; if this process is killed, the case's own processes end by themselves."""
        for path in (lab.notebook, lab.folder.parent):
            if not path.exists():
                failure = f"{path} does not exist on {socket.gethostname()}: keep it on a file system of all engines"
                return _Ended(folder=lab.folder, failure=failure)
        try:
            return _Ended(folder=lab.run(self._report).folder)
        except LabFailedError as failed:
            return _Ended(folder=failed.folder, failure=str(failed))


def run_on_engine(
    engines: Balanced, lab: PreparedLab, on_progress: Callable[[str], object], on_start: Callable[[Engine], object]
) -> Path:
    """Runs a case on the next free engine, and on another one if that engine is lost.

    Args:
        engines: They serve `CaseOnEngine`.
        lab: The case; its notebook and its folder are on a file system that all engines see.
        on_progress: Called with one line for each cell that begins.
        on_start: Called with each engine on which the case begins.

    Raises:
        LabFailedError: If the run did not come to its end.
        CallLostError: If each engine on which it began was lost.
    """

    def begin(engine: Engine) -> None:
        for abandoned in lab.folder.parent.glob(f".{lab.folder.name[:100]}.running-*"):  # by an engine that is lost
            shutil.rmtree(abandoned, ignore_errors=True)
        on_start(engine)

    ended: _Ended = engines.submit("run", lab, on_start=begin, on_report=on_progress).result()
    if ended.failure:
        raise LabFailedError(ended.failure, ended.folder)
    return ended.folder
