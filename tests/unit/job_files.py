"""Jobs of other frameworks that a test writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memlab.jobs.job import Job


def read_job(text: str, folder: Path, name: str = "run.sh", **options: Any) -> Job:
    """Writes a job's file into a folder, and reads it."""
    (folder / name).write_text(text)
    return Job.read(folder / name, **options)
