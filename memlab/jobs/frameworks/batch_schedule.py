"""Global batches of Megatron's jobs that change while the job runs, or that are made smaller to divide.

Read in Megatron-Core's ``num_microbatches_calculator.py`` (0.16.1, and d98e8a64, which has schedules) and in what
Megatron-LM (d98e8a64) and Megatron-Bridge (067f987d) pass to it.
"""

from __future__ import annotations

from memlab.jobs.frameworks.framework import CannotStartError, Reading

_KEYS = ("step_batch_size_schedule", "rampup_batch_size", "decrease_batch_size_if_needed", "global_batch_size")
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def take_batch(reading: Reading, prefix: str = "", *, has_schedule: bool = True) -> None:
    """Takes the largest global batch of a schedule, and whether one is made smaller so that micro-batches divide it.

    Args:
        has_schedule: Whether the framework passes a schedule on.
    """
    key, ramp, decreases, whole = (prefix + name for name in _KEYS)
    if reading.get(decreases):
        reading.take(decreases, "decreases_batch", value=True)
    if reading.get(ramp) is not None:
        reading.warnings.append(
            f"{ramp}: the first steps have fewer micro-batches, and memlab predicts the steps with the whole "
            f"{whole} (Megatron-Core's main ignores the key)"
        )
    sizes = _sizes(reading.get(key), reading.values.get("seq_length")) if has_schedule else []
    if not sizes:
        return
    if reading.entries.get(whole) is not None:  # a log has it too, without the flag
        reading.warnings.append(
            f"{key} and {whole} are both given: Megatron refuses both as flags, and memlab takes the schedule"
        )
    reading.take(key, "global_batch_size", max(sizes))
    reading.values["batches_of_schedule"] = sizes
    if len(set(sizes)) > 1:
        reading.warnings.append(
            f"{key}: memlab predicts the steps with the largest batch; the others have fewer micro-batches"
        )


def check_schedule(reading: Reading) -> None:
    """Checks the rules of ``StepBatchsizeNumMicroBatchesCalculator``.

    Raises:
        CannotStartError: If one refuses the job.
    """
    key, _, decreases, _ = _KEYS
    schedule = reading.entries.get(key)
    if schedule is None:
        return
    if reading.entries.get(decreases):
        raise CannotStartError(
            f"{key} and {decreases} are both given, must be one of them (Megatron-Core): leave one out",
            "global_batch_size",
        )
    if not _sizes(schedule, reading.values.get("seq_length")):
        raise CannotStartError(
            f"{key} is {schedule!r}, must be pairs such as '0:768 250B:1536', the first at 0 "
            "and no two within one sequence (Megatron-Core): write it so",
            "global_batch_size",
        )


def largest_batch(reading: Reading, per_pass: int) -> int | None:
    """Returns the largest batch of a schedule that passes of so many sequences divide; None without one.

    Megatron looks at a batch when its steps come (``update``), so a job starts whatever its later batches are.
    """
    sizes = reading.values.get("batches_of_schedule") or ()
    found = max((size for size in sizes if size % per_pass == 0), default=None)
    if found is not None and (stops := [size for size in sizes if size % per_pass]):
        reading.warnings.append(
            f"{_KEYS[0]}: a batch has {stops[0]} sequences, must be a multiple of {per_pass} (micro-batch x data "
            f"parallel): Megatron stops when its steps come, so memlab predicts those with {found}; change the batch"
        )
    return found


def _sizes(schedule: object, seq_length: int | None) -> list[int]:
    """Reads the batches of ``THRESHOLD:BATCH THRESHOLD:BATCH ...``; none where Megatron would refuse it.

    A threshold is a number of tokens, of which Megatron counts the whole sequences: the first may be above 0, and two
    that count equally many are refused.
    """
    entries = [] if schedule is None else str(schedule).replace(",", " ").split()
    try:
        pairs = [tuple(map(_number, entry.split(":", 1))) for entry in entries]
    except (ValueError, OverflowError):  # the latter from inf
        return []
    if any(len(pair) < 2 or pair[1] <= 0 for pair in pairs):
        return []
    starts = {threshold // (seq_length or 1) for threshold, _ in pairs}
    return [size for _, size in pairs] if len(starts) == len(pairs) and min(starts, default=1) == 0 else []


def _number(text: str) -> int:
    text = text.strip().upper()
    factor = _FACTORS.get(text[-1:], 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)
