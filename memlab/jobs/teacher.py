"""Adds the passes of a teacher, which a job's file describes as a model of its own, to those of the student's job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memlab.config.rollout import TeacherPass

if TYPE_CHECKING:
    from memlab.jobs.job import Job

_SECTION = "teacher."
_NAME = f"{_SECTION}model_name"


def with_teacher(job: Job, teacher: Job) -> Job:
    """Returns a student's job with the passes of its teacher among what it does between steps.

    Args:
        job: Of the student, in which the teacher's name is not modelled.
        teacher: The same file, read as the teacher's.
    """
    reason = _why_not(job, teacher)
    if reason is not None:
        told = f"the teacher's passes between the steps are not predicted: {reason}"
        rows = (replace(one, reason=told) if one.key == _NAME else one for one in job.not_modelled)
        return replace(job, not_modelled=tuple(rows))
    assert job.rollout is not None and teacher.scenario is not None and teacher.rollout is not None, "it is predicted"
    passes = TeacherPass(scenario=teacher.scenario, num_microbatches=teacher.rollout.num_passes)
    own = {key: reason for key, reason in teacher.without_effect.items() if key.startswith(_SECTION)}
    others = tuple(one for one in job.not_modelled if one.key != _NAME)
    return replace(
        job,
        rollout=replace(job.rollout, teacher=passes),
        taken=job.taken + tuple(one for one in teacher.taken if _is_given(one.key, one.place)),
        without_effect={key: reason for key, reason in job.without_effect.items() if not key.startswith(_SECTION)}
        | own,
        not_modelled=others + tuple(one for one in teacher.not_modelled if one.key.startswith(_SECTION)),
        warnings=job.warnings + tuple(f"teacher: {each}" for each in teacher.warnings if each not in job.warnings),
    )


def _is_given(key: str, place: str) -> bool:
    return key.startswith(_SECTION) and place != "default"


def _why_not(job: Job, teacher: Job) -> str | None:
    """Returns why a teacher's passes are not predicted; None if they are."""
    if job.scenario is None or job.rollout is None:
        return "nor is what this job does between its steps"
    if job.rollout.engine_bytes is not None:
        return "Megatron's own engine generates, after which nothing of the student leaves the device for them"
    if teacher.scenario is None or teacher.rollout is None:
        return teacher.cannot_start or teacher.not_supported or "memlab predicts no passes of its model"
    return None
