"""What the checkout of SkyRL lacks in which a job's file lies: an earlier release, or a fork of one."""

from __future__ import annotations

from pathlib import Path

from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.text_file import text_of

_PACKAGES = ("skyrl/train", "skyrl_train", "skyrl-train/skyrl_train", "skyrl-train/skyrl/train")
"""Where the trainer is in a checkout, of main and of releases before 0.3."""
_CONFIGURATIONS = ("config/config.py", "config/ppo_base_config.yaml")
SEGMENTS = "trainer.use_expandable_segments"


def note_checkout(reading: Reading) -> None:
    """Takes segments of fixed size where the checkout's trainer has no key for others, and says which checkout it is.

    A key of the job's own stays: Hydra refuses one that the configuration lacks.
    """
    file = earlier_checkout(reading)
    if file is None:
        return
    if SEGMENTS not in reading.entries.by_key:
        reading.take(SEGMENTS, "expandable_segments", value=False)
    reading.warnings.append(
        f"{file} is of an earlier SkyRL, or of a fork of one, without {SEGMENTS}: memlab takes the allocator that "
        "the environment chooses, and does not see what else that trainer does otherwise"
    )


def earlier_checkout(reading: Reading) -> Path | None:
    """Returns a configuration of the checkout around a job if that is an earlier SkyRL's, or a fork's of one."""
    found = _configuration_around(reading.started)
    return None if found is None or SEGMENTS.rpartition(".")[2] in found[1] else found[0]


def _configuration_around(path: Path) -> tuple[Path, str] | None:
    """Returns the first file of the nearest checkout's configuration, and the text of all."""
    for folder in path.absolute().parents:
        files = [folder / package / name for package in _PACKAGES for name in _CONFIGURATIONS]
        texts = {file: text for file in files if (text := text_of(file)) is not None}
        if texts:
            return next(iter(texts)), "\n".join(texts.values())
    return None
