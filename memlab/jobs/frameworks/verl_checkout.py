"""Which version of verl a job's file lies beside: in a checkout, or with a recipe that asks for a release."""

from __future__ import annotations

import re
from pathlib import Path

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


def version_around(path: Path) -> tuple[str, str] | None:
    """Returns the version among `VERSIONS` whose defaults the nearest checkout or recipe has, and what says so.

    None where the file lies in neither, where the checkout is of the weeks between two versions, and where the recipe
    asks for a commit. Nothing in it is executed.
    """
    for folder in path.absolute().parents:
        if (required := _text(folder / _REQUIRED)) is not None:
            return _asked_for(required, folder / _REQUIRED)
        texts = [_text(folder / _ENGINES / engine / "transformer_impl.py") for engine in ("fsdp", "megatron")]
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


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
