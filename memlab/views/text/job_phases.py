"""The phases of a job of reinforcement learning as text."""

from __future__ import annotations

from memlab.fitting.peak_range import PeakRange
from memlab.record.job_phases import JobPhase, JobPhases
from memlab.units import GIB, format_bytes


def phases_table(job: JobPhases, peak: PeakRange | None = None) -> str:
    """Returns a row for each phase, and what the host holds; without a `peak`, nothing is known only as a bound."""
    gpu = "" if job.gpu_memory_bytes is None else f" of {format_bytes(job.gpu_memory_bytes)}"
    header = _row("", "training", "left for engine", "engine", "left")
    lines = [f"phases of the job on rank {job.rank}{gpu}, GiB", header, *(_phase(phase) for phase in job.phases)]
    if not job.is_colocated:
        lines.append("the inference engine has other GPUs")
    elif job.gpu_memory_bytes is None:
        lines.append("what is left depends on the GPU: give --gpu-memory SIZE")
    elif any(phase.engine_bytes is None for phase in job.phases):
        lines.append("the file does not say which share of the GPU the inference engine takes")
    if job.gathered_bytes is None:
        lines.append(
            "the framework chooses the bucket of the weight sync by the GPU's memory, so it is not counted above"
        )
    elif job.gathered_bytes == 0:
        lines.append("weight sync gathers nothing")
    else:
        lines.append(f"weight sync gathers {format_bytes(job.gathered_bytes)} at a time, which is counted above")
    if job.reference_bytes:
        lines.append(f"the reference model takes {format_bytes(job.reference_bytes)}, which is counted above")
    if job.kept_buffer_bytes:
        lines.append(f"every phase counts {format_bytes(job.kept_buffer_bytes)} that the weight sync keeps")
    lines += [*_of_teacher(job), *_of_cache(job)]
    for phase in job.phases:
        short = _short(phase)
        is_certain = peak is None or (short > peak.less_bytes and not peak.may_be_lower)
        if short:
            verb, kind = "does not" if is_certain else "may not", "reserved" if phase.reserved_bytes else "allocated"
            lines.append(f"{phase.name} {verb} fit: short by {format_bytes(short)} of {kind} bytes")
    node, rank = format_bytes(job.host_bytes_of_node), format_bytes(job.host_bytes_of_rank)
    lines.append(f"host memory of a node: {node} ({job.ranks_per_node} ranks x {rank}, if all are like this rank)")
    return "\n".join(lines)


def _of_teacher(job: JobPhases) -> list[str]:
    if job.teacher_left_bytes is None:
        return []
    (passes,) = (phase for phase in job.phases if phase.name == "teacher's passes")
    peaks = {"allocated": passes.allocated_bytes, "active": passes.active_bytes, "reserved": passes.reserved_bytes}
    words = ", ".join(f"{name} {format_bytes(size or 0)}" for name, size in peaks.items())
    left = format_bytes(job.teacher_left_bytes)
    return [
        f"the teacher's process at the peak of its passes: {words}",
        f"every other phase counts {left} that it keeps, and what is outside torch counts both processes",
    ]


def _of_cache(job: JobPhases) -> list[str]:
    most = ", ".join(
        f"{phase.name} {format_bytes(phase.most_reserved_bytes)}" for phase in job.phases if phase.most_reserved_bytes
    )
    late = format_bytes(job.late_free_bytes)
    lines = [f"blocks that wait for other streams may add {late} to a pass"] if job.late_free_bytes else []
    if most:
        lines.append(f"torch may hold this at most with what other passes have cached: {most}")
        lines.append("it returns what is cached before a request fails")
    return lines


def _short(phase: JobPhase) -> int:
    """Returns what is missing at least, where a phase does not fit; 0 where it fits or that is not known."""
    left = phase.left_for_engine_bytes if phase.left_bytes is None else phase.left_bytes
    return max(0, -left) if left is not None else 0


def _phase(phase: JobPhase) -> str:
    values = (phase.training_bytes, phase.left_for_engine_bytes, phase.engine_bytes, phase.left_bytes)
    return _row(phase.name, *("?" if value is None else f"{value / GIB:.2f}" for value in values))


def _row(name: str, *values: str) -> str:
    return f"  {name:18}" + "".join(f"{value:>17}" for value in values)
