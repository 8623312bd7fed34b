"""What a job's file says whatever model it trains, for jobs whose model memlab does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from memlab.config.architectures import ARCHITECTURES, Architecture, published_architecture
from memlab.config.lora import LINEARS
from memlab.config.training_state import TrainingState
from memlab.config.validation import MOST_LAYERS
from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.frameworks.fsdp2 import TYPES_OF_FUSED_ADAM
from memlab.jobs.job import Job
from memlab.jobs.other_models import OtherModel, shown_fields

_KINDS = {"llama-3.1-8b": 4, "qwen2.5-14b": 3, "qwen3-235b-a22b": 5, "deepseek-v3": 6}
"""Models of different kinds and sizes, with the layers that each chunk of the pipeline gets of them: what a job has
with all of them cannot come from one of them."""
_LAYERS_OF_A_CHUNK = ("layers_of_chunk", "num_layers_per_virtual_pipeline_stage")
_OF_LATENT_ATTENTION = (
    "attention_backend {}: of models with latent attention, only where Transformer Engine has it with their sizes"
)
_OF_BF16 = ("grad_reduce_in_bf16",)
"""What memlab reads otherwise in another type: in fp16, gradients are summed in fp16 or in fp32."""
_NOT_OF_THE_JOB = {
    *("architecture", "num_layers", "routing", "expert_buffers", "seed", "versions"),
    *("layout", "state", "allocator"),  # parts of their own
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAnyModel:
    """What is the same for models of all kinds that the job can train, and the words that each of them brings."""

    models: tuple[str, ...]
    """The models that memlab read the job with, in place of its own."""
    model: dict[str, Any]
    """What is known of the job's own model: its name, what memlab lacks of it, its fields and their source."""
    is_own: bool
    """Whether memlab read the job with its own model, and only lacks the type in which it computes, or its engine."""
    values: dict[str, dict[str, Any]]
    """Fields of the layout, the workload, the training state, the allocator, the settings and the rollout."""
    depends_on_model: tuple[str, ...]
    """The fields that differ between these models."""
    cannot_start: str | None
    """A rule that refuses the job with each of these models."""
    questions: tuple[str, ...]
    """What memlab has to know before it can read the job with any model."""
    not_modelled: tuple[NotModelled, ...]
    """Without bounds, which depend on the model."""
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as JSON-ready values."""
        return {
            "models": list(self.models),
            "model": self.model,
            **self.values,
            "depends_on_model": list(self.depends_on_model),
            "cannot_start": self.cannot_start,
            "questions": list(self.questions),
            "not_modelled": [{"key": one.key, "effect": one.effect, "reason": one.reason} for one in self.not_modelled],
            "warnings": list(self.warnings),
        }


def of_any_model(job: Job, read: Callable[[Architecture | None], Job]) -> OfAnyModel | None:
    """Reads a job that memlab cannot predict with models in place of its own, and compares them.

    Where the model is known and memlab only lacks its layers, two models of its sizes take its place, else four of
    different kinds and sizes.

    Args:
        job: Read with its own model.
        read: Reads its fields (`Job.read`) with another model, or with its own.

    Returns:
        None where there is nothing to add: memlab can predict the job, or it cannot start, or its model is not what
        keeps memlab from it.
    """
    if job.scenario is not None or job.cannot_start is not None:
        return None
    given = {one.field: one.memlab_value for one in job.taken}
    jobs = [read(None)] if job.precision or job.has_own_engine else []
    is_own = any(one.scenario is not None for one in jobs)
    breaks_rule = not job.has_own_engine and any(one.cannot_start for one in jobs)
    if not (is_own or breaks_rule):
        jobs = [read(model) for model in _stand_ins(job.model, given)]
    if not breaks_rule and not [one for one in jobs if one.scenario is not None]:
        spreads_experts = (given.get("expert_model_parallel_size") or 1) > 1
        models = [_in_place(ARCHITECTURES[name], layers, given) for name, layers in _KINDS.items()]
        jobs = [read(model) for model in models if model.routes or not spreads_experts]
        if spreads_experts and not [one for one in jobs if one.scenario is not None]:
            jobs = [read(model) for model in models]  # where memlab has no experts of the job's kind
    return _compared(job, jobs, TrainingState().options() | given, is_own=is_own)


def _compared(job: Job, jobs: list[Job], said: dict[str, Any], *, is_own: bool) -> OfAnyModel | None:
    started = [one for one in jobs if one.scenario is not None]
    tables = [_values(one) for one in started]
    names = list(dict.fromkeys((part, name) for table in tables for part, fields in table.items() for name in fields))
    values: dict[str, dict[str, Any]] = {}
    depends: list[str] = []
    for part, name in names:
        found = [table[part][name] for table in tables if name in table[part]]
        # The provider of the only model that has such a part may set it otherwise than the job.
        is_of_one = part == "state" and len(found) == 1 < len(tables) and found[0] != said.get(name, found[0])
        # Automodel has classes of its own of some families only, and all models in place of the job's are of these.
        is_of_family = name == "model_classes" and not is_own and found[0] != TrainingState().model_classes
        # ms-swift's all-linear names whatever linears the model has, also kinds that none of these models has.
        is_of_model = name == "lora_target_modules" and job.framework == "ms-swift" and tuple(said[name]) == LINEARS
        if all(one == found[0] for one in found) and not (is_of_one or is_of_family or is_of_model):
            values.setdefault(part, {})[name] = found[0]
        else:
            depends.append(name)
    experts = said.get("expert_model_parallel_size") or 1
    if values.get("layout", {}).get("expert_model_parallel_size", experts) != experts:
        values["layout"]["expert_model_parallel_size"] = experts  # dense models took the place of the job's
    for name in TYPES_OF_FUSED_ADAM:  # models in place of the job's are read with torch's Adam
        if name in values.get("state", {}):
            values["state"][name] = said.get(name, values["state"][name])
    questions = [] if started else [one for one in _common(one.questions for one in jobs) if one != job.not_supported]
    # Models that the job's engine does not build say nothing of its rules.
    rules = {one.cannot_start for one in jobs} - {None}
    cannot_start = rules.pop() if len(rules) == 1 and not started else None
    if not (started or questions or cannot_start):
        return None
    compared = started or jobs
    latent = [one.required()[0].state.attention_backend for one in started if _is_latent(one)]
    backend = values.get("state", {}).get("attention_backend")
    doubts = [_OF_LATENT_ATTENTION.format(backend)] if backend is not None and {backend} < {backend, *latent} else []
    if job.precision and started:
        doubts.append(f"{job.precision}: the fields are those of the same job in bf16, but for the types")
        values["workload"]["dtype"] = "fp16"
        for name in _OF_BF16:
            values["state"].pop(name, None)
    missing = [[replace(row, bound_bytes=None) for row in one.not_modelled] for one in compared]
    return OfAnyModel(
        models=tuple(dict.fromkeys(one.scenario.architecture.name for one in started if one.scenario is not None)),
        model=_fields_of(job),
        is_own=is_own,
        values=values,
        depends_on_model=tuple(dict.fromkeys(depends)),
        cannot_start=cannot_start,
        questions=tuple(questions),
        not_modelled=tuple(_common(missing)),
        warnings=(*doubts, *filter(_is_of_job, _common(one.warnings for one in compared))),
    )


def _is_of_job(warning: str) -> bool:
    """Whether a warning says more than that another model took the place of the job's own."""
    return not warning.startswith("--architecture ")


def _fields_of(job: Job) -> dict[str, Any]:
    """Returns what is known of the job's own model, with its name and the source of the rest."""
    layers = [one.memlab_value for one in job.taken if one.field == "num_layers" and one.memlab_value is not None]
    depth = {"num_layers": layers[-1]} if layers else {}
    model = job.model
    if model is not None:
        return {"name": model.name, "lacks": model.lacks, "source": model.source, "fields": model.all_fields() | depth}
    names = [str(one.memlab_value) for one in job.taken if one.field == "architecture"]
    known = published_architecture(names[-1]) if names else None
    if known is None:
        return {}
    fields = shown_fields(known) | depth
    return {"name": known.name, "lacks": "", "source": "memlab's models", "fields": fields}


def _stand_ins(model: OtherModel | None, given: dict[str, Any]) -> list[Architecture]:
    if model is None:
        return []
    try:
        models = model.stand_ins()
    except ValueError:  # sizes of a file that no model has; whoever reads them for a prediction says so
        return []
    if "num_layers" in model.all_fields():
        return list(models)
    return [_in_place(one, layers, given) for layers, one in enumerate(models, start=4)]


def _in_place(model: Architecture, layers: int, given: dict[str, Any]) -> Architecture:
    """Returns a model that is as deep as the job's pipeline needs, and that names no length of its own."""
    chunks = (given.get("pipeline_model_parallel_size") or 1) * (given.get("virtual_pipeline_model_parallel_size") or 1)
    # Where a job says how many layers a chunk has, models of other depths have another number of chunks.
    chunks *= next((given[name] for name in _LAYERS_OF_A_CHUNK if given.get(name)), 1)
    ends = [given.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    fixed = [end for end in ends if end is not None]
    depth = sum(fixed) + max(0, chunks - len(fixed)) * max(layers, given.get("recompute_num_layers") or 0)
    depth = min(max(depth, 1), MOST_LAYERS)
    pattern = model.moe_layer_freq and (0, *[1] * (depth - 1))
    return replace(model, num_layers=depth, moe_layer_freq=pattern, default_seq_length=1024 * layers)


def _values(job: Job) -> dict[str, dict[str, Any]]:
    """Returns fields by part, without those of what the model, or memlab's engine with this model, does not have."""
    scenario, settings = job.required()
    values, state = scenario.to_dict(), scenario.state.options()
    model = scenario.architecture
    absent = {"lora_": scenario.state.lora is None, "moe_": not model.routes}
    absent["moe_shared_expert_"] = not model.moe_shared_expert_intermediate_size
    absent["attention_backend"] = _is_latent(job)
    without = tuple(start for start, is_absent in absent.items() if is_absent)
    return {
        "workload": {name: value for name, value in values.items() if name not in _NOT_OF_THE_JOB},
        "layout": values["layout"],
        "state": {name: value for name, value in state.items() if not name.startswith(without)},
        "allocator": values["allocator"],
        "settings": settings.to_dict(),
        "rollout": {} if job.rollout is None else job.rollout.to_dict(),
    }


def _is_latent(job: Job) -> bool:
    return job.required()[0].architecture.multi_latent_attention


def _common(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """Returns what is in all of the lists, in the order of the first."""
    first, *others = [list(one) for one in lists] or [[]]
    return [one for one in first if all(one in other for other in others)]
