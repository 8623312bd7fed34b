"""CUDA graphs of a job: a graph of a whole iteration and graphs of layers are predicted, and others are named."""

from __future__ import annotations

from memlab.config.architectures import Architecture
from memlab.jobs.frameworks.framework import CannotStartError, NotModelled, Reading
from memlab.jobs.frameworks.keys import WORDS

_IMPL = "cuda_graph_impl"
_WHOLE, _OF_ENGINE = "full_iteration", "transformer_engine"
_OLD = {"enable_cuda_graph": "local", "external_cuda_graph": _OF_ENGINE}
"""Switches of megatron-core 0.15 and before, and what they mean (transformer_config.py, 0.16.1)."""


def complete_cuda_graphs(reading: Reading, architecture: Architecture) -> None:
    """Takes the graphs that memlab predicts for a model, also by the names that megatron-core had before 0.18.

    There a graph of the whole iteration was a scope of ``local``.

    Raises:
        CannotStartError: If layers are in graphs that Megatron-Core refuses to recompute as a whole.
    """
    for one in reading.not_modelled.copy():
        impl = _impl_of(one)
        if impl is None:
            continue
        section, dot, _ = one.key.rpartition(".")
        keys = [f"{section}{dot}cuda_graph_{each}" for each in ("scope", "modules")]
        named = {key: modules for key in keys if (modules := _names(reading.get(key)))}
        modules = [module for each in named.values() for module in each]
        if impl == "local" and _WHOLE in modules:
            _take(reading, one, _WHOLE)
        elif impl == _OF_ENGINE and _is_predicted(reading, architecture, modules):
            _take(reading, one, _OF_ENGINE)
            for key in named:
                reading.take(key, "cuda_graph_modules", tuple(modules))
    of_layers = reading.values.get(_IMPL) == _OF_ENGINE or any(_impl_of(one) for one in reading.not_modelled)
    if of_layers and reading.values.get("recompute_granularity") == "full":
        raise CannotStartError(
            "recompute_granularity is 'full' with CUDA graphs of layers, which Megatron-Core refuses "
            "(transformer_config.py, 0.16.1): choose selective recompute, or a graph of the whole iteration",
            *("recompute_granularity", _IMPL),
        )
    is_tied = architecture.share_embeddings_and_output_weights
    if reading.values.get(_IMPL) == _WHOLE and (is_tied or architecture.routes or _has_other_layers(reading)):
        (key,) = reading.take_back(_IMPL)
        reading.values[_IMPL] = "none"
        reason = (
            "with experts, adapters, a reference model, tied embeddings, fp32, unfused attention or offload between "
            "steps memlab predicts no graph of a whole iteration"
        )
        reading.miss(key, "more", reason)


def _impl_of(one: NotModelled) -> str | None:
    """Returns which graphs a key asks for, those of Megatron (``local``) or of Transformer Engine; None if none."""
    name = one.key.rpartition(".")[2]
    impl = one.value if name == _IMPL else _OLD.get(name)
    return impl if impl in ("local", _OF_ENGINE) else None


def _take(reading: Reading, one: NotModelled, impl: str) -> None:
    reading.not_modelled.remove(one)
    reading.take_back(_IMPL)
    reading.take(one.key, _IMPL, impl)


def _is_predicted(reading: Reading, architecture: Architecture, modules: list[str]) -> bool:
    """Whether memlab predicts graphs of these modules, or of whole layers without any.

    What is before experts is predicted, but not experts, and not what decides later how many rows they get.
    """
    values, packs = reading.values, reading.values.get("packed_sequences") is not None
    predicted = {"attn", "mlp"}
    if architecture.routes:
        predicted |= {"moe_router", "moe_preprocess"}
        names = ("moe_expert_capacity_factor", "moe_shared_expert_overlap")
        if (
            not modules
            or values.get("moe_token_dispatcher_type", "alltoall") != "alltoall"
            or any(map(values.get, names))
        ):
            return False
    if not {*modules} <= predicted or (packs and "attn" in (modules or ["attn"])):
        return False
    beside = values.get("fp8_format"), values.get("mtp_num_layers")
    return not any(beside) and not _has_other_layers(reading)


def _has_other_layers(reading: Reading) -> bool:
    """Whether a job has what memlab predicts in no graph: another model, torch's products, or offload."""
    values = reading.values
    return (
        values.get("reference_model", "none") != "none"
        or values.get("lora_rank") is not None
        or values.get("dtype") == "fp32"
        or values.get("attention_backend") in ("unfused", "local")
        or values.get("transformer_impl") == "local"
        or any(values.get(f"offload_{group}") for group in ("parameters", "gradients", "optimizer"))
    )


def _names(scopes: object) -> list[str]:
    """Returns the names of scopes, which may be members of Megatron's enum, as in ``CudaGraphScope.attn``."""
    return [name for scope in WORDS.read(scopes) or () if (name := scope.rpartition(".")[2]) != "full"]
