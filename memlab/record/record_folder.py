"""The folder of one saved record: ``record.json`` with everything but the timeline, and ``timeline.npz``."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from memlab.config.from_json import read_json
from memlab.config.validation import shortened
from memlab.record.file_format import FORMAT, check_format
from memlab.record.timeline import Timeline


def write_record(folder: Path | str, values: dict[str, Any], timeline: Timeline | None) -> Path:
    """Writes a record into a folder, which is made if it is missing.

    ``record.json`` appears last and at once, so no reader finds half a record, or one with another's timeline. Of
    two processes that save to the same folder, the second is refused.

    Raises:
        ValueError: If the folder has a record already, or cannot be written to.
        OSError: If the disk is full. Nothing of the record is left then.
    """
    folder = Path(folder)
    claim = folder / ".record.json.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim.open("x").close()
    except OSError as error:
        if error.errno == errno.ENOSPC:  # the commands report a full disk in their own words
            raise
        reason = (error.strerror or type(error).__name__).lower()
        if claim.name in str(error.filename) and error.errno == errno.EEXIST:
            reason = f"another process saves a record there, or was killed while it did and left {claim.name}"
        raise ValueError(f"{shortened(folder)} cannot take a record ({reason}): give a new folder") from error
    try:
        if (folder / "record.json").exists():
            raise ValueError(f"{shortened(folder)} has a record, which is never overwritten: give a new folder")
        (folder / "timeline.npz").unlink(missing_ok=True)
        if timeline is not None:
            timeline.save(folder / "timeline.npz")
        claim.write_text(json.dumps({"format": FORMAT, **values}, indent=2) + "\n", encoding="utf-8")
        claim.replace(folder / "record.json")
    finally:
        claim.unlink(missing_ok=True)
        if not (folder / "record.json").exists():
            (folder / "timeline.npz").unlink(missing_ok=True)
    return folder


def read_record(folder: Path | str) -> tuple[Any, Timeline | None]:
    """Reads what `write_record` wrote, and what memlab 0.1.0 wrote, which had no format number.

    Returns:
        The values as they are in the file, with the format number, and the timeline.

    Raises:
        ValueError: If the folder holds no record, or a file cannot be read.
    """
    path, timeline_path = Path(folder) / "record.json", Path(folder) / "timeline.npz"
    action = "give a folder that `memlab measure --out` or StepRecord.save wrote"
    try:
        if not path.exists():
            raise ValueError(f"{folder} holds no record.json: {action}")
        timeline = Timeline.load(timeline_path) if timeline_path.exists() else None
    except OSError as error:  # a name that is too long, a folder that may not be entered
        reason = (error.strerror or type(error).__name__).lower()
        raise ValueError(f"{shortened(folder)} cannot be read ({reason}): {action}") from error
    return read_json(path, action), timeline


def without_format(values: Any) -> Any:
    """Returns the values of a record without their format number, which it checks.

    Raises:
        ValueError: If a newer memlab wrote them.
    """
    if not isinstance(values, dict) or "format" not in values:
        return values
    versions = values.get("versions")
    written_by = (versions if isinstance(versions, dict) else {}).get("memlab", "of an unknown version")
    check_format(values["format"], shortened(written_by))
    return {name: value for name, value in values.items() if name != "format"}
