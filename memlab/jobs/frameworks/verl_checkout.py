"""Which version of verl a job's file lies beside: in a checkout, or with requirements that ask for a release."""

from __future__ import annotations

import re
from pathlib import Path

from memlab.jobs.text_file import text_of

RELEASE, FP32_SINCE, BEFORE = "0.9.1", "2026-08-20", "before-2026-08-20"
VERSIONS = (RELEASE, FP32_SINCE, BEFORE)
_REQUIRED = "REQUIRED_VERL.txt"
"""In each folder of verl-project/verl-recipe (48ea0a79)."""
_ENGINES = "verl/workers/engine"
_SYNC_KEY, _SYNC, _FP32 = (
    "use_no_sync_for_gradient_accumulation",
    "def _gradient_sync_context",
    "def _resolve_override_ddp_config",
)
"""What the engines' sources have since 0.9.1, since July 2026, and since June 2026."""
_VERSION_FILES = ("verl/version/version", "verl/verl/version/version")
"""In a checkout of verl, and in a repository that has one in a folder of that name."""
_PPO_TRAINER = ("verl/trainer/ppo/ray_trainer.py", "verl/verl/trainer/ppo/ray_trainer.py")
_FIRST_WITH_OTHER_CHECKS = (0, 5)
_DEVICES = ("verl/utils/device.py", "verl/verl/utils/device.py")
_FIRST_WITH_SEGMENTS = (0, 6)
_SFT_TRAINER = ("verl/trainer/fsdp_sft_trainer.py", "verl/verl/trainer/fsdp_sft_trainer.py")
_REQUIREMENTS = ("requirements*.txt", "pyproject.toml", "setup.py")
_REQUIREMENT = re.compile(
    r"^[^#\n]{0,500}?(?<![\w.-])verl(?:\[[\w,-]{0,100}\])?\s{0,9}==\s{0,9}([0-9]+(?:[.][0-9]+)+)", re.MULTILINE
)
"""Of no other package, such as ``my-verl``, and of no comment."""
_FIRST_WITH_ENGINES = (0, 8)
"""Before, ``verl.trainer.main_ppo`` trains with its workers from before the engines unless the job says else."""
_FIRST_KNOWN = (0, 9)
"""Whose configurations have the defaults of memlab's tables."""


def version_around(path: Path) -> tuple[str, str] | None:
    """Returns the version among `VERSIONS` whose defaults the nearest checkout or recipe has, and what says so.

    None where the file lies in neither, where the checkout is of the weeks between two versions, and where the recipe
    asks for a commit. Nothing in it is executed.
    """
    found = _by_its_engines(path)
    release = release_around(path)
    if found is not None or release is None:
        return found
    numbers, what = release
    return (BEFORE, what) if numbers < _FIRST_KNOWN else (RELEASE, what) if numbers == (0, 9, 1) else None


def release_around(path: Path) -> tuple[tuple[int, ...], str] | None:
    """Returns the numbers of the release that the nearest checkout has or repository requires, and what says so."""
    for folder in path.absolute().parents:
        for file in (folder / name for name in _VERSION_FILES):
            if (text := text_of(file)) is not None and (numbers := _numbers(text)):
                return numbers, f"{file} says verl {text.strip()[:20]}"
        for file in _requirements(folder):
            if (text := text_of(file)) is not None and (match := _REQUIREMENT.search(text[:200_000])):
                return _numbers(match[1]), f"{file} requires verl {match[1]}"
    return None


def has_earlier_configurations(path: Path) -> bool:
    """Whether a file lies in a checkout whose own configurations have other defaults than memlab's tables."""
    release = release_around(path)
    return release is not None and release[0] < _FIRST_KNOWN


def trains_without_engines(path: Path) -> str | None:
    """Returns what says that the jobs of a file train with verl's workers from before the engines, None if nothing."""
    release = release_around(path)
    return release[1] if release is not None and release[0] < _FIRST_WITH_ENGINES else None


def checks_prompts(path: Path) -> bool:
    """Whether verl refuses a mini-batch of more prompts than a step has: its trainer asserts that since 2025-03.

    The trainer of the nearest checkout is read; its checks are in other files since 0.5.
    """
    release = release_around(path)
    if release is None or release[0] >= _FIRST_WITH_OTHER_CHECKS:
        return True
    files = (folder / name for folder in path.absolute().parents for name in _PPO_TRAINER)
    text = next((text for file in files if (text := text_of(file)) is not None), None)
    return text is None or re.search(r"train_batch_size >= .*ppo_mini_batch_size", text) is not None


def leaves_segments(path: Path) -> bool:
    """Whether the nearest checkout, or the release that a repository requires, never switches expandable segments on.

    verl does since e6843cc8 (2025-08-13), so 0.5.0 does not and 0.6.0 does.
    """
    files = (folder / name for folder in path.absolute().parents for name in _DEVICES)
    if (text := next((text for file in files if (text := text_of(file)) is not None), None)) is not None:
        return "def set_expandable_segments" not in text
    release = release_around(path)
    return release is not None and release[0] < _FIRST_WITH_SEGMENTS


def trains_without_fsdp2(path: Path) -> bool:
    """Whether a file lies in a checkout whose ``fsdp_sft_trainer`` has FSDP1 alone."""
    files = (folder / name for folder in path.absolute().parents for name in _SFT_TRAINER)
    text = next((text for file in files if (text := text_of(file)) is not None), "fsdp2")
    return "fsdp2" not in text


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\s*([0-9]+(?:[.][0-9]+)*)", text)
    return () if match is None else tuple(map(int, match[1].split(".")[:3]))


def _requirements(folder: Path) -> list[Path]:
    try:
        return [file for name in _REQUIREMENTS for file in sorted(folder.glob(name))[:20]]
    except OSError:
        return []


def _by_its_engines(path: Path) -> tuple[str, str] | None:
    for folder in path.absolute().parents:
        if (required := text_of(folder / _REQUIRED)) is not None:
            return _asked_for(required, folder / _REQUIRED)
        texts = [text_of(folder / _ENGINES / engine / "transformer_impl.py") for engine in ("fsdp", "megatron")]
        if None in texts:
            continue
        fsdp, megatron = map(str, texts)
        has = (_FP32 in megatron, _SYNC in fsdp, _SYNC_KEY in fsdp)
        found = {(True, True, True): RELEASE, (True, True, False): FP32_SINCE, (False, False, False): BEFORE}.get(has)
        return None if found is None else (found, f"the file lies in a checkout of verl, {folder}")
    return None


def _asked_for(text: str, file: Path) -> tuple[str, str] | None:
    tag = re.search(r"^TAG=v([0-9]+)[.]([0-9]+)[.]([0-9]+)\S*$", text, re.MULTILINE)
    if tag is None:
        return None
    release = tuple(map(int, tag.groups()))
    found = BEFORE if release < (0, 9, 0) else RELEASE if release >= (0, 9, 1) else FP32_SINCE
    return found, f"{file} asks for verl {tag[0].removeprefix('TAG=')}"
