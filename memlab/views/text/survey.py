"""A survey of job files as text: how many memlab can predict, and what the others miss."""

from __future__ import annotations

from memlab.jobs.survey import OUTCOMES, Outcome, Survey
from memlab.views.text.columns import Block, Table, as_text

_MOST_MODELS, _MOST_MISSING = 20, 30
_HEADS: dict[Outcome, str] = {
    "expressible": "expressible",
    "bounded": "bounded gaps",
    "unbounded": "unbounded",
    "asked": "asked",
    "read": "read",
    "refused": "refused",
    "cannot start": "cannot start",
    "failed": "failed",
}


def survey_table(survey: Survey) -> str:
    """Returns the report that ``memlab recipes`` prints."""
    head = f"{survey.folder}: {len(survey.files):,} of {survey.num_files:,} scripts and configurations are jobs"
    blocks: list[Block] = [[head], _table("framework", survey.counts("framework"))]
    models = survey.counts("model")
    blocks.append(_table("model", dict(list(models.items())[:_MOST_MODELS])))
    if len(models) > _MOST_MODELS:
        blocks.append([f"and {len(models) - _MOST_MODELS} other models: --json lists all"])
    missing = survey.missing()
    if missing:
        rows = [["what is missing, and in how many jobs", "jobs"]]
        rows += [[name, f"{count:,}"] for name, count in list(missing.items())[:_MOST_MISSING]]
        blocks.append(Table(rows))
        if len(missing) > _MOST_MISSING:
            blocks.append([f"and {len(missing) - _MOST_MISSING} others: --json lists all, with each file"])
    if survey.unreadable:
        path, reason = next(iter(survey.unreadable.items()))
        blocks.append([f"{len(survey.unreadable):,} files cannot be read, as {path}: {reason}"])
    return as_text(blocks)


def _table(name: str, counts: dict[str, dict[Outcome, int]]) -> Table:
    rows = [[name, *_HEADS.values(), "jobs"]]
    for key, numbers in [*counts.items(), ("all", _sum(counts))]:
        cells = [f"{numbers[outcome]:,}" if numbers[outcome] else "" for outcome in OUTCOMES]
        rows.append([key, *cells, f"{sum(numbers.values()):,}"])
    return Table(rows)


def _sum(counts: dict[str, dict[Outcome, int]]) -> dict[Outcome, int]:
    return {outcome: sum(numbers[outcome] for numbers in counts.values()) for outcome in OUTCOMES}
