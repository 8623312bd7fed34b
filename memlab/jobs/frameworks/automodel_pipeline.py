"""Pipeline stages of NeMo Automodel's recipes: the schedule, its micro-batches, and the parts of the model on a rank.

``components/distributed/pipelining/functional.py`` and ``recipes/llm/train_ft.py`` of 36044ad3; 0.7.0 has the same
rules. What ``local_batch_size`` counts are the rows of one run of the schedule, and ``pp_microbatch_size`` those of a
micro-batch.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.pipeline_layout import FIELD
from memlab.config.scenario import Scenario
from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.fsdp2 import block
from memlab.jobs.frameworks.keys import COUNT

_SECTION = "distributed.pipeline"
_SCHEDULE, _ROWS = f"{_SECTION}.pp_schedule", f"{_SECTION}.pp_microbatch_size"
_LAYERS, _ROUNDING = f"{_SECTION}.layers_per_stage", f"{_SECTION}.round_virtual_stages_to_pp_multiple"
_DEFER = "distributed.defer_fsdp_grad_sync"
_SCHEDULES = ("1f1b", "interleaved1f1b")


def refuse_schedules(reading: Reading) -> None:
    """Notes schedules and divisions of a model that memlab does not have."""
    if _stages(reading) == 1:
        return
    if _schedule(reading) not in _SCHEDULES:
        block(reading, _SCHEDULE, f"pipeline schedules other than {' and '.join(_SCHEDULES)}")
    for name in ("pp_schedule_csv", "module_fqns_per_model_part"):
        if reading.get(f"{_SECTION}.{name}") is not None:
            block(reading, f"{_SECTION}.{name}", "a schedule or a division of the model of the recipe's own")


def take_microbatches(reading: Reading) -> None:
    """Takes the micro-batches of a run of the schedule, and how many runs an update has.

    Raises:
        CannotStartError: If the rows cannot be divided so.
    """
    values, stages = reading.values, _stages(reading)
    if stages == 1:
        return
    of_run, rows = values["micro_batch_size"], COUNT.read(reading.get(_ROWS, default=1))
    if of_run % rows or of_run // rows < stages:
        raise CannotStartError(
            f"step_scheduler.local_batch_size is {of_run}, must be a multiple of {_ROWS} {rows}, and have at least one "
            f"micro-batch for each of the {stages} stages, by a rule of NeMo Automodel: change one of them",
            "step_scheduler.local_batch_size",
            _ROWS,
        )
    copies = values["world_size"] // (stages * values["tensor_model_parallel_size"] * values["context_parallel_size"])
    reading.take(_ROWS, "micro_batch_size", rows)
    values["schedule_runs"] = max(1, values["global_batch_size"] // (of_run * max(1, copies)))
    if values["fp32_sharded_params"] and reading.get(f"{_SECTION}.dtype") is None:
        reading.miss(
            f"{_SECTION}.dtype", "more", "without it, stages receive into buffers of the type of the shards, fp32"
        )
    if not values["defer_fsdp_grad_sync"]:
        reading.miss(_DEFER, "less", "gradients are reduced after each micro-batch, and memlab keeps them whole")
        values["defer_fsdp_grad_sync"] = True
    reading.known |= {f"{_SECTION}.dtype", f"{_SECTION}.pp_seq_len", _SCHEDULE}


def take_chunks(reading: Reading, architecture: Architecture) -> None:
    """Takes how many parts of the model a rank has (``calculate_virtual_stages``).

    Raises:
        CannotStartError: If they do not fit the schedule, or the stages.
    """
    stages = _stages(reading)
    if stages == 1:
        return
    is_interleaved, layers = _schedule(reading) != "1f1b", reading.get(_LAYERS)
    num_layers = reading.values.get("num_layers") or architecture.num_layers
    parts = stages * (2 if is_interleaved else 1)
    if layers is not None:
        parts = _parts(num_layers, stages, COUNT.read(layers), reading.get(_ROUNDING))
        reading.known |= {_LAYERS, _ROUNDING}
    of_rank, remainder = divmod(parts, stages)
    if remainder or of_rank < 1 or (of_rank > 1) is not is_interleaved:
        raise CannotStartError(
            f"{_LAYERS} is {layers}, which makes {parts} parts of {num_layers} layers on {stages} stages, must make "
            f"{'several' if is_interleaved else 'one'} for each stage, by a rule of NeMo Automodel: change it, or "
            f"{_ROUNDING}",
            _LAYERS,
            _ROUNDING,
        )
    if parts > num_layers:
        raise CannotStartError(
            f"{parts} parts of {num_layers} layers on {stages} stages, must have a layer each, by a rule of NeMo "
            f"Automodel: choose fewer distributed.pp_size, or more {_LAYERS}",
            "pipeline_model_parallel_size",
            _LAYERS,
        )
    reading.values["virtual_pipeline_model_parallel_size"] = of_rank
    if num_layers % parts:
        reading.values[FIELD] = _divided(num_layers, parts)


def layout_of_parts(scenario: Scenario) -> str | None:
    """Returns the layout that a recipe can say of a scenario's layers; None if all parts have as many."""
    num_layers, parts = scenario.num_layers, len(scenario.chunks)
    return _divided(num_layers, parts) if num_layers % parts else None


def _parts(num_layers: int, stages: int, of_each: int, rounding: Any) -> int:
    parts = ceil(num_layers / of_each)
    more = -parts % stages
    return parts + {"up": more, "down": more and more - stages}.get(str(rounding), 0)


def _divided(num_layers: int, parts: int) -> str:
    """Returns the layout whose first parts have a layer more (``generate_hf_model_fqn_per_model_part``)."""
    each, more = divmod(num_layers, parts)
    return f"E{'|'.join('t' * (each + (number < more)) for number in range(parts))}L"


def composed_of_pipeline(scenario: Scenario) -> dict[str, Any]:
    """Returns values by the fields of the table of keys, from which the functions above make the same stages."""
    layout = scenario.layout
    if layout.pipeline_model_parallel_size == 1:
        return {}
    is_interleaved = layout.virtual_pipeline_model_parallel_size > 1
    of_run = scenario.num_microbatches // scenario.state.schedule_runs
    layers, rounding = _written(scenario) if is_interleaved else (None, None)
    return {
        "schedule": _SCHEDULES[is_interleaved],
        "layers_of_chunk": layers,
        "rounding_of_chunks": rounding,
        "rows_of_stage": scenario.micro_batch_size,
        "micro_batch_size": scenario.micro_batch_size * of_run,
        "defer_fsdp_grad_sync": True,
    }


def _written(scenario: Scenario) -> tuple[int | None, str | None]:
    """Returns the number of layers and the rounding that make as many parts; the default is two on each rank."""
    num_layers, stages = scenario.num_layers, scenario.layout.pipeline_model_parallel_size
    pairs = ((layers, rounding) for rounding in (None, "up", "down") for layers in range(1, num_layers + 1))
    made = (pair for pair in pairs if _parts(num_layers, stages, *pair) == len(scenario.chunks))
    return next(made, (None, None))


def _stages(reading: Reading) -> int:
    return reading.values.get("pipeline_model_parallel_size") or 1


def _schedule(reading: Reading) -> str:
    return str(reading.get(_SCHEDULE, default=_SCHEDULES[0])).lower()
