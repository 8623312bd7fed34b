"""What a recipe of NeMo Automodel says about its own classes of models with experts.

``BackendConfig`` in models/common/utils.py, with the defaults of a GPU with Transformer Engine, and
``MoEParallelizerConfig`` in distributed/config.py (36044ad3).
"""

from __future__ import annotations

from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.families import FAMILIES
from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.keys import Effect

_BACKEND = "model.backend"
_KEYS = ("dispatcher", "dispatcher_num_sms", "experts", "attn", "linear", "rms_norm", "enable_deepep", "rope")
_PARALLEL = "distributed.moe"
_RESHARD = "distributed.reshard_after_forward"
_DISPATCHERS = {"torch": ("allgather", None), "deepep": ("flex", "deepep"), "hybridep": ("flex", "hybridep")}
_OF_LIBRARIES = tuple(name for name, (_, library) in _DISPATCHERS.items() if library is not None)
_SMS = 20


def take_experts(reading: Reading, model: Architecture) -> None:
    """Takes the classes of a model with experts, and notes what of them memlab does not have.

    Args:
        reading: Of the recipe, whose other values are taken.
        model: With experts.

    Raises:
        ValueError: If the recipe combines them with what memlab has only with transformers' classes.
    """
    values = reading.values
    _refuse(reading, model)
    reading.known |= {f"{_BACKEND}.{key}" for key in _KEYS}
    _take_attention(reading)
    if values["expert_model_parallel_size"] > 1:
        _take_exchange(reading)
        _take_parallelizer(reading)
    else:
        _check_exchange_of_one(reading)
    experts = reading.get(f"{_BACKEND}.experts", default="torch_mm")
    # Without a library for the exchange, ``te`` and ``gmm`` become ``torch_mm``.
    is_of_torch = values.get("moe_token_dispatcher_type") != "flex"
    if experts == "torch" and is_of_torch:
        reading.miss(f"{_BACKEND}.experts", "either", "experts are multiplied one by one, and not in one product")
    elif experts not in ("torch", "torch_mm", "gmm", *("te",) * is_of_torch):
        reading.miss(f"{_BACKEND}.experts", "either", f"memlab has one product of all experts, not {experts}")
    if reading.get(f"{_BACKEND}.rms_norm") == "quack":
        reading.miss(f"{_BACKEND}.rms_norm", "either", "memlab has no norms of QuACK")
    linear = reading.get(f"{_BACKEND}.linear", default="te")
    if linear == "te":
        reading.take(f"{_BACKEND}.linear", "linear_implementation", linear)
    elif linear != "torch":
        reading.miss(f"{_BACKEND}.linear", "more", f"matrix products of {linear} have a workspace of their own")
    if reading.get(f"{_BACKEND}.fake_balanced_gate", default=False):
        reading.take(f"{_BACKEND}.fake_balanced_gate", "fake_balanced_gate", True)
        if reading.get(f"{_BACKEND}.fake_gate_noise", default=0):
            reading.miss(f"{_BACKEND}.fake_gate_noise", "either", "tokens choose experts by random scores")
    precision = reading.get(f"{_BACKEND}.gate_precision")
    is_exact = model.multi_latent_attention and not FAMILIES[model.family].weighs_after
    if precision is not None and ("32" in str(precision)) != is_exact:
        effect: Effect = "less" if is_exact else "more"
        reading.miss(f"{_BACKEND}.gate_precision", effect, "the router multiplies in this type")
    _take_optimizations(reading)


def _refuse(reading: Reading, model: Architecture) -> None:
    values = reading.values
    of_te = reading.get(f"{_BACKEND}.attn", default="te") == "te"
    both = {
        "adapters": any(key.startswith("peft.") for key in reading.entries.by_key),
        "context parallelism": values["context_parallel_size"] > 1,
        "tensor parallelism": values["tensor_model_parallel_size"] > 1,
        "selective checkpoints": values.get("selective_ac", False),
        "an offload policy": values["fsdp_cpu_offload"],
        "latent attention that is not Transformer Engine's": model.multi_latent_attention and not of_te,
        "sinks in attention that is not Transformer Engine's": model.softmax_type == "learnable" and not of_te,
        "the release's biases": model.add_bias_linear and reading.version == "0.7.0",
        "the release's weights of a router": FAMILIES[model.family].weighs_after and reading.version == "0.7.0",
    }
    for what, is_on in both.items():
        if is_on:
            reading.lacks.append(f"Automodel's own experts beside {what}")
            raise ValueError(
                f"{model.name} has experts, of which memlab does not have NeMo Automodel's own classes beside {what}: "
                "leave the recipe out"
            )


def _take_attention(reading: Reading) -> None:
    kind = reading.get(f"{_BACKEND}.attn", default="te")
    reading.values["attn_implementation"] = "sdpa"
    if kind == "te":
        reading.take(f"{_BACKEND}.attn", "attn_implementation", "te")


def _take_exchange(reading: Reading) -> None:
    key = f"{_BACKEND}.dispatcher"
    given = reading.get(key)
    if given is None:
        reading.warnings.append(
            f"{key} is not in the file, and Automodel takes DeepEP where it is installed, which memlab takes too: give "
            f"--set {key}=torch where it is not"
        )
    kind, library = _DISPATCHERS.get(str(given or "deepep"), ("flex", "deepep"))
    reading.take(key, "moe_token_dispatcher_type", kind)
    if library is not None:
        reading.values["moe_flex_dispatcher_backend"] = library
    if library == "deepep":
        sms = reading.get(f"{_BACKEND}.dispatcher_num_sms", default=_SMS)
        reading.take(f"{_BACKEND}.dispatcher_num_sms", "moe_deepep_num_sms", sms)
    if given not in (None, *_DISPATCHERS):
        reading.miss(key, "either", f"memlab has no buffers of {given}, and takes DeepEP's")
    shared = f"{_BACKEND}.dispatcher_share_token_dispatcher"
    if library is not None and not reading.get(shared, default=True):
        reading.miss(shared, "more", "each layer keeps what its own dispatcher has of a pass")
    if reading.get(f"{_BACKEND}.dispatcher_async_dispatch", default=False):
        reading.miss(f"{_BACKEND}.dispatcher_async_dispatch", "more", "what is freed waits for the exchange")


def _check_exchange_of_one(reading: Reading) -> None:
    """Refuses what Automodel builds and cannot run: only ``apply_ep``, of several ranks, gives experts a dispatcher.

    Raises:
        CannotStartError: If the recipe's dispatcher needs one (``GroupedExpertsDeepEP`` in moe/experts.py).
    """
    key = f"{_BACKEND}.dispatcher"
    given = reading.get(key)
    if given in (*_OF_LIBRARIES, "uccl_ep") and reading.values["world_size"] > 1:
        raise CannotStartError(
            f"{key} is {given!r} with distributed.ep_size 1 on {reading.values['world_size']} ranks, must be torch "
            "there by a rule of NeMo Automodel, whose experts else end with an AttributeError in their first pass: "
            f"give --set {key}=torch, or a distributed.ep_size above 1",
            *("moe_token_dispatcher_type", "expert_model_parallel_size"),
        )
    if given is None:
        reading.warnings.append(
            f"{key} is not in the file, and with distributed.ep_size 1 Automodel runs only where DeepEP is not "
            "installed, which memlab takes: its dispatcher is then torch"
        )


def _take_parallelizer(reading: Reading) -> None:
    """Takes how the parallelizer of models with experts shards: it frees nothing after forward unless it is told to."""
    values = reading.values
    values["separate_embeddings"] = "both"
    if reading.get(_RESHARD) is None:
        frees = bool(reading.get(f"{_PARALLEL}.reshard_after_forward", default=False))
        reading.taken = [one for one in reading.taken if one.key != _RESHARD]
        reading.take(f"{_PARALLEL}.reshard_after_forward", "reshard_after_forward", "all" if frees else "none")
    if values["reshard_after_forward"] == "none":
        values |= {"fsdp2_forward_prefetch_depth": 0, "fsdp2_backward_prefetch_depth": 0}
    for name, usual, effect, reason in _OTHERS:
        key = f"{_PARALLEL}.{name}"
        given = reading.get(key, default=usual)
        if given != usual:
            reading.miss(key, effect, reason)  # type: ignore[arg-type]


_OTHERS: tuple[tuple[str, Any, str, str], ...] = (
    ("ignore_router_for_ac", True, "less", "the router is computed again too"),
    ("lm_head_precision", None, "more", "the output layer computes in this type"),
    ("mp_policy", None, "either", "types of experts' units of their own"),
)


def _take_optimizations(reading: Reading) -> None:
    key = f"{_BACKEND}.enable_fsdp_optimizations"
    is_on = reading.get(key, default=False)
    if is_on and reading.values["reshard_after_forward"] != "none":
        reading.miss(key, "more", "gathered parameters stay until the last micro-batch")
