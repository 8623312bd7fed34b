"""Files beside a job are read in bounded time and memory."""

from __future__ import annotations

import os
from pathlib import Path

from memlab.jobs.text_file import text_of


def test_a_pipe_and_a_large_file_keep_no_reader_waiting(tmp_path: Path) -> None:
    """A pipe that nobody writes to would be read for ever."""
    os.mkfifo(tmp_path / "pipe")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**32)
    assert text_of(tmp_path / "pipe") is None and text_of(tmp_path) is None and text_of(tmp_path / "none") is None
    assert len(text_of(large) or "") < 2**22
