"""Jobs that others ran and measured, with their arguments: what memlab's predictions are compared with."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.config.from_json import build, read_json
from memlab.jobs.job import Job
from memlab.lab_files import labs_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedJob:
    """A job, and the bytes that torch had allocated on a rank of it, or that its GPU showed."""

    name: str
    repository: str
    path: str
    commit: str
    date: str
    megatron_core: str
    """The version that Megatron-LM's checkout gives itself; empty if it is not known."""
    gpu: str
    num_ranks: int
    rank: int | None
    """The rank that was measured; None if the highest peak of all ranks is given."""
    peak_bytes: int
    """The most since the process began: Megatron-LM never resets it."""
    between_steps_bytes: int | None
    """After a step; None if it was not published."""
    note: str
    arguments: dict[str, Any]
    """Those of Megatron-LM that decide about memory; empty if they are not published."""
    environment: dict[str, str] = field(default_factory=dict)
    """The variables of the test that decide about memory, such as the options of torch's allocator."""
    script: str = ""
    """The commands that start a job of another framework."""
    is_of_gpu: bool = False
    """Whether the GPU showed the bytes: what torch reserves, and what CUDA and its libraries take outside it."""
    terms: str = ""
    """What is known of the difference between prediction and measurement, in a phrase."""

    def read(self) -> Job:
        """Reads the script, or the arguments as ``memlab job`` reads the ``model_config.yaml`` of a test.

        Raises:
            ValueError: If memlab cannot understand them.
        """
        with tempfile.TemporaryDirectory() as folder:
            if self.script:
                file = Path(folder) / "run.sh"
                file.write_text(self.script)
                return Job.read(file)
            file = Path(folder) / "model_config.yaml"
            # A list of modules is a text in brackets there.
            is_plain = {flag: isinstance(value, str) and value[0] != "[" for flag, value in self.arguments.items()}
            values = {flag: value if is_plain[flag] else json.dumps(value) for flag, value in self.arguments.items()}
            lines = ["MODEL_ARGS:", *(f"  {flag}: {value}" for flag, value in values.items())]
            lines += ["ENV_VARS:", *(f"  {name}: {value}" for name, value in self.environment.items())]
            file.write_text("\n".join([*lines, ""]))
            return Job.read(file, format_name="megatron-lm", world_size=self.num_ranks)


def published_jobs() -> list[PublishedJob]:
    """Returns the jobs of ``labs/results/published_jobs.json``.

    Raises:
        ValueError: If the file is damaged.
    """
    rows = read_json(labs_folder() / "results" / "published_jobs.json", "take memlab's own file")
    return [build(PublishedJob, row, f"published_jobs.json, job {number}") for number, row in enumerate(rows, 1)]
