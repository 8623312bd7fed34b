"""Transformer Engine's user buffers in a job's file: how each of them is used, and what memlab does not predict beside.

The names are those of ``initialize_ub`` (``transformer_engine/pytorch/module/base.py``, 2.12.0 and 2.16.1), which takes
``tp_comm_overlap_cfg``: a mapping in Megatron-Bridge, the path of a YAML file in Megatron-LM.
"""

from __future__ import annotations

from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.option import options_of
from memlab.config.training_state import RING_EXCHANGES, TrainingState
from memlab.config.user_buffers import METHODS
from memlab.config.validation import shortened
from memlab.jobs.frameworks.framework import Reading

OPTION, CONFIG = "tp_comm_overlap", "tp_comm_overlap_cfg"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "PipelineOverlapCfg": {"method": "pipeline", "fp8_buf": [False]},
    "RingExchangeOverlapCfg": {"method": "ring_exchange"},
    "BulkOverlapCfg": {"method": "bulk"},
}
"""Of Megatron-Bridge's classes (``training/comm_overlap.py``, 0.6.2 and 067f987d). One is a tuple with False in it,
which Transformer Engine takes for true."""
_FIELDS = tuple(name for name in options_of(TrainingState) if name.startswith("tp_comm_"))
NOT_WRITTEN = dict.fromkeys(_FIELDS, "memlab writes user buffers into jobs of Megatron-LM and Megatron-Bridge only")
"""Why memlab writes none of the options, by each."""
METHODS_NOT_WRITTEN = {"tp_comm_overlap_ring_exchange": f"give {CONFIG}, with the method of these buffers"}
NO_FLAGS = METHODS_NOT_WRITTEN | {name: "Megatron-LM has no argument for it" for name in _FIELDS if "_disable_" in name}
_REASON = "user buffers of Transformer Engine's overlap of tensor parallel communication"


def defaults_of_class(name: str) -> dict[str, Any]:
    """Returns the defaults that memlab reads of one of Megatron-Bridge's classes; none of another class."""
    return _DEFAULTS.get(name, {})


def complete_user_buffers(reading: Reading, architecture: Architecture) -> None:
    """Takes which buffers are larger, and names user buffers that memlab does not predict in such a job."""
    values = reading.values
    if not values.get(OPTION):
        return
    what = _not_beside(reading, architecture)
    key = next((one.key for one in reading.taken if one.field == OPTION and one.memlab_value), OPTION)
    if what:
        reading.take_back(OPTION)
        reading.miss(key, "more", f"{_REASON}, which memlab does not have beside {what}")
        values[OPTION] = False
        return
    configs = [name for name in reading.entries.by_key if name.rpartition(".")[2] == CONFIG]
    for name in configs:
        if isinstance(file := reading.get(name), str) and file:
            reading.miss(name, "either", f"a file that memlab does not read says how large {_REASON} are")
    _take_methods(reading)


def _take_methods(reading: Reading) -> None:
    """Takes which buffers go from rank to rank, and names those that are used as memlab does not know them."""
    values, ring = reading.values, []
    for one, value in _given(reading).items():
        buffer, _, name = one.partition(f"{CONFIG}.")[2].rpartition(".")
        if name == "method" and buffer in RING_EXCHANGES and value == "ring_exchange":
            ring.append(buffer)
            reading.take(one, "tp_comm_overlap_ring_exchange", tuple(ring))
        elif name == "method" and buffer in METHODS and value != METHODS[buffer]:
            reading.miss(one, "either", f"a user buffer that memlab knows only with the method {METHODS[buffer]!r}")
        elif buffer and name != "_target_" and buffer not in METHODS:
            reading.miss(one, "unknown", f"memlab knows no user buffer {shortened(buffer)}")
        elif name == "fp8_buf" and buffer in RING_EXCHANGES and value and values.get("fp8_format"):
            reading.miss(one, "either", "outputs are summed in FP8")
        elif name == "atomic_gemm" and value:
            reading.miss(one, "more", "products that wait for one another have a buffer for their whole output")


def _given(reading: Reading) -> dict[str, Any]:
    """Returns what is given of the buffers by key, with the defaults of a class that ``_target_`` names."""
    given = {one: reading.get(one) for one in reading.entries.by_key if f"{CONFIG}." in one}
    for one, target in list(given.items()):
        section, _, name = one.rpartition(".")
        if name != "_target_":
            continue
        kind = str(target).rpartition(".")[2]
        of_class = defaults_of_class(kind)
        given |= {f"{section}.{name}": value for name, value in of_class.items() if f"{section}.{name}" not in given}
        if not of_class and kind != "TransformerLayerTPOverlapCfg":
            reading.miss(one, "either", f"memlab does not read what it says of {_REASON}")
    return given


def _not_beside(reading: Reading, architecture: Architecture) -> str:
    """Names what of a job memlab does not predict with user buffers; nothing if it predicts them."""
    values = reading.values
    fp4 = [one for one in reading.not_modelled if one.key.rpartition(".")[2] in ("fp4", "fp4_format")]
    beside = {
        "adapters": values.get("lora_rank") is not None or any(one.key == "peft" for one in reading.not_modelled),
        "latent attention": architecture.multi_latent_attention,
        "multi-token prediction": bool(values.get("mtp_num_layers")),
        "overlapped shared experts": bool(values.get("moe_shared_expert_overlap")),
        "Megatron's own layers": values.get("transformer_impl") == "local",
        "FP4": bool(fp4),
        "tp_comm_overlap_rs_dgrad in FP8": bool(values.get("tp_comm_overlap_rs_dgrad") and values.get("fp8_format")),
    }
    return next((what for what, is_there in beside.items() if is_there), "")
