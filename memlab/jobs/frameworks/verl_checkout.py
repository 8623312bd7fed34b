"""Which version of verl is in the checkout that a job's file lies in."""

from __future__ import annotations

from pathlib import Path

RELEASE, FP32_SINCE, BEFORE = "0.9.1", "2026-08-20", "before-2026-08-20"
VERSIONS = (RELEASE, FP32_SINCE, BEFORE)
_ENGINES = "verl/workers/engine"
_SYNC_KEY, _SYNC, _FP32 = (
    "use_no_sync_for_gradient_accumulation",
    "def _gradient_sync_context",
    "def _resolve_override_ddp_config",
)
"""What the engines' sources have since 0.9.1, since July 2026, and since June 2026."""


def version_around(path: Path) -> tuple[str, str] | None:
    """Returns the version among `VERSIONS` whose defaults the nearest checkout has, and the checkout's folder.

    None where the file lies in no checkout, and where the checkout is of the weeks between two versions. Nothing in it
    is executed.
    """
    for folder in path.absolute().parents:
        texts = [_text(folder / _ENGINES / engine / "transformer_impl.py") for engine in ("fsdp", "megatron")]
        if None in texts:
            continue
        fsdp, megatron = map(str, texts)
        has = (_FP32 in megatron, _SYNC in fsdp, _SYNC_KEY in fsdp)
        found = {(True, True, True): RELEASE, (True, True, False): FP32_SINCE, (False, False, False): BEFORE}.get(has)
        return None if found is None else (found, str(folder))
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
