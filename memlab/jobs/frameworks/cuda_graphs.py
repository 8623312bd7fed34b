"""CUDA graphs of a job: one graph of a whole iteration is predicted, and graphs of layers are named as not modelled."""

from __future__ import annotations

from memlab.config.architectures import Architecture
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.keys import WORDS

_IMPL = "cuda_graph_impl"
_WHOLE = "full_iteration"


def complete_cuda_graphs(reading: Reading, architecture: Architecture) -> None:
    """Takes a graph of a whole iteration from the names that megatron-core had for it before 0.18.

    It was a scope of ``local``, or of ``enable_cuda_graph``, which meant ``local`` (transformer_config.py, 0.16.1).
    """
    for one in reading.not_modelled.copy():
        section, name, _ = one.key.rpartition(_IMPL if one.key.endswith(_IMPL) else "enable_cuda_graph")
        if not name or (name == _IMPL and one.value != "local"):
            continue
        scopes = {scope for key in ("scope", "modules") for scope in _names(reading.get(f"{section}cuda_graph_{key}"))}
        if _WHOLE in scopes:
            reading.not_modelled.remove(one)
            reading.taken = [each for each in reading.taken if each.field != _IMPL]
            reading.take(one.key, _IMPL, _WHOLE)
    if reading.values.get(_IMPL) == _WHOLE and architecture.routes:
        (given,) = [each for each in reading.taken if each.field == _IMPL]
        reading.taken.remove(given)
        reading.values[_IMPL] = "none"
        reading.miss(given.key, "more", "memlab does not predict a CUDA graph of a whole iteration with experts")


def _names(scopes: object) -> list[str]:
    """Returns the names of scopes, which may be members of Megatron's enum, as in ``CudaGraphScope.attn``."""
    return [scope.rpartition(".")[2] for scope in WORDS.read(scopes) or ()]
