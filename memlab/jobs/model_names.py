"""What the names of folders, files and runs say about a job's model, where its own name says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from memlab.config.architectures import ARCHITECTURES, SAME_SIZES, Architecture, published_architecture

_OF_A_CHECKPOINT = re.compile(
    r"(?i)(global_?step|checkpoint|ckpt|iter|step|epoch|release|v)?[-_]?(\d+|latest|last|final|best)|hugging_?face"
    r"|(hf|hf_model|actor|policy|merged|merged_hf_model|model|weights|snapshots|release|export(s|ed)?)"
)
"""Folders that trainers make below the folder of a model."""
_LEAST_PARTS, _MOST_FILES, _MOST_BYTES = 2, 60, 200_000


def named_by_a_folder(path: str) -> tuple[Architecture, str] | None:
    """Returns the model whose name a folder above a checkpoint has, with that folder; None where there is none.

    Args:
        path: Such as ``models/qwen2.5_0.5b/global_step_29/huggingface``.
    """
    parts = [part for part in path.rstrip("/").split("/") if part]
    while len(parts) > 1 and _OF_A_CHECKPOINT.fullmatch(parts[-1]):
        parts.pop()
    for name in (parts[-1], parts[-1].replace("_", "-")) if parts else ():
        if (known := published_architecture(name)) is not None:
            return known, parts[-1]
    return None


def lines_of_siblings(script: Path, model: str) -> list[str]:
    """Returns the lines with a model's path of the scripts beside a job that write or read the folder of its model.

    Args:
        script: The job's file.
        model: Path of its model, such as ``./model_save/sft/global_step_1/actor`` of a job before it.
    """
    parts = [part for part in model.split("/") if part not in ("", ".", "..")]
    while parts and _OF_A_CHECKPOINT.fullmatch(parts[-1]):
        parts.pop()
    if len(parts) < _LEAST_PARTS or "$" in model:
        return []
    folder, found = re.compile(re.escape("/".join(parts)) + r"(?![\w.-])"), []
    for file in sorted(script.parent.glob("*.sh"))[:_MOST_FILES]:
        try:
            if file.name == script.name or not file.is_file() or file.stat().st_size > _MOST_BYTES:
                continue
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:  # a script of another user says nothing
            continue
        if folder.search(text):
            found += [line for line in text.splitlines() if "/" in line and "model" in line.lower()]
    return found


def models_in(texts: Iterable[str]) -> list[str]:
    """Returns the models that memlab knows and that texts such as a run's name mention, each once."""
    found: list[str] = []
    for text in texts:
        low = text.lower()
        spans: dict[tuple[int, int], str] = {}
        for name in (*ARCHITECTURES, *SAME_SIZES):
            parts = re.split(r"[-_]", name)
            pattern = r"(?<![a-z0-9.])" + "[-_]?".join(map(re.escape, parts)) + r"(?![a-z0-9]|\.\d)"
            if (match := re.search(pattern, low)) is not None and len(parts) > 1:
                spans[match.span()] = SAME_SIZES.get(name, name)
        for (start, end), name in spans.items():
            inside = any(first <= start and end <= last and (first, last) != (start, end) for first, last in spans)
            if not inside and name not in found:
                found.append(name)
    return found
