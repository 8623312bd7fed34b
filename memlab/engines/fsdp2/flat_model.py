"""A model that FSDP1 has sharded, torch's `FullyShardedDataParallel`, as verl does with its strategy ``fsdp``.

Each layer's parameters are one flat parameter, of which a rank keeps a part (``verl/workers/engine/fsdp/
transformer_impl.py``, 1dda039b).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._init_utils import SHARDING_STRATEGY_MAP
from torch.distributed.fsdp.wrap import CustomPolicy

from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState as Options
from memlab.engines.fsdp2.adapters import MatrixOfAdapter
from memlab.engines.fsdp2.sharded_model import DTYPES, ShardedModel, on_device
from memlab.meter.labels import keeping


class FlatModel(ShardedModel):
    """A rank's part of a model; the arguments are those of `ShardedModel`."""

    def set_gathering(self, state: Options) -> None:
        """Says whether layers free their gathered parameters after forward, and gather the next layer's before."""
        for unit in FullyShardedDataParallel.fsdp_modules(self.module):
            unit.forward_prefetch = state.fsdp2_forward_prefetch_depth > 0
            if unit._handle is not None and unit._handle.uses_sharded_strategy:
                unit.sharding_strategy = _strategy(state)
                unit._handle._sharding_strategy = SHARDING_STRATEGY_MAP[unit.sharding_strategy]

    def set_gradient_sync(self, is_last: bool) -> None:
        """Says whether the next backward reduces gradients."""
        for unit in FullyShardedDataParallel.fsdp_modules(self.module):
            unit._sync_gradients = is_last

    def clip(self, max_norm: float) -> None:
        """Clips the gradients."""
        self.module.clip_grad_norm_(max_norm)

    @property
    def inner(self) -> Any:
        """Transformers' model."""
        return self.module.module

    @property
    def layers(self) -> list[Any]:
        """The transformer layers, without what wraps them."""
        return [wrapped.module for wrapped in self.inner.model.layers]

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Yields the modules of transformers' model by their names there."""
        for name, module in self.inner.named_modules():
            if not isinstance(module, FullyShardedDataParallel):
                yield name.replace("._fsdp_wrapped_module", ""), module

    def shards(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yields each flat parameter's part and its gradient, as FSDP1's own objects have them."""
        for handle in self._handles():
            flat = handle.flat_param
            yield getattr(flat, "_local_shard", flat), flat.grad

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yields what is there of gradients.

        With ``use_orig_params``, dropping those of all parameters leaves the flat parameter's until the next forward
        (``_reset_flat_param_grad_info_if_needed`` in torch/distributed/fsdp/_flat_param.py, 2.11 and 2.13).
        """
        yield from (gradient for _, gradient in self.shards() if gradient is not None)

    def workspace(self) -> Iterator[torch.Tensor]:
        """Yields what is kept beside shards and optimizer state: also a zero of the clipping's."""
        yield from super().workspace()
        if (zero := getattr(self.module, "_zero_scalar", None)) is not None:
            yield zero

    def reset(self) -> None:
        """Ends what a step has left that did not reach its end: gathered parameters, and gradients."""
        for unit in FullyShardedDataParallel.fsdp_modules(self.module):
            if unit._handle is not None and hasattr(unit._handle.flat_param, "_local_shard"):
                _end_step(unit)
        self.module._post_backward_callback_queued = False
        self.reset_optimizer()

    def _shard(self, mesh_device: str, scenario: Scenario) -> None:
        state = scenario.state
        replicas, ranks = state.dp_replicate_size, scenario.ranks_of_shards
        shape = (ranks,) if replicas == 1 else (replicas, ranks)
        reduced = torch.bfloat16 if state.grad_reduce_in_bf16 else torch.float32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a device without a number, and one rank that shards nothing
            self.module = FullyShardedDataParallel(
                self.module,
                device_mesh=init_device_mesh(mesh_device, shape),
                auto_wrap_policy=CustomPolicy(partial(_is_unit, [*self.module.model.layers])),
                mixed_precision=MixedPrecision(
                    param_dtype=DTYPES[scenario.dtype], reduce_dtype=reduced, buffer_dtype=torch.float32
                ),
                sharding_strategy=_strategy(state),
                device_id=next(self.module.parameters()).device,
                param_init_fn=lambda module: None,
                use_orig_params=state.use_orig_params,
            )

    def _to_device(self) -> None:
        with keeping("parameters"):
            for handle in self._handles():
                handle.flat_param.data = on_device(handle.flat_param.data)
                if handle._use_orig_params:
                    handle._use_sharded_views()
        with keeping("workspace"):
            for module in self.module.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, on_device(buffer))

    def _handles(self) -> Iterator[Any]:
        for unit in FullyShardedDataParallel.fsdp_modules(self.module):
            if unit._handle is not None:
                yield unit._handle


def _is_unit(layers: list[Any], module: Any) -> bool:
    """Whether verl wraps a module: a layer, and of adapters each matrix, beside which a unit has nothing frozen.

    After ``get_fsdp_wrap_policy`` in ``verl/utils/fsdp_utils.py``.
    """
    return any(module is layer for layer in layers) or isinstance(module, MatrixOfAdapter)


def _strategy(state: Options) -> ShardingStrategy:
    """Returns what verl takes: the last layer's parameters are freed like the others'."""
    keeps = state.reshard_after_forward == "none"
    if state.dp_replicate_size > 1:
        return ShardingStrategy._HYBRID_SHARD_ZERO2 if keeps else ShardingStrategy.HYBRID_SHARD
    return ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD


def _end_step(unit: Any) -> None:
    """Leaves a unit as it is between steps, as ``_post_backward_final_callback`` does where nothing failed."""
    handle = unit._handle
    flat = handle.flat_param
    for state in getattr(flat, "_post_backward_hook_state", ())[1:]:
        state.remove()
    flat.__dict__.pop("_post_backward_hook_state", None)
    flat.__dict__.pop("_saved_grad_shard", None)
    flat.grad = None
    flat._post_backward_called = False
    if handle.uses_sharded_strategy:
        for name in ("_full_param_padded", "_full_prec_full_param_padded"):
            if (gathered := getattr(flat, name, None)) is not None:
                gathered.untyped_storage().resize_(0)
    if (low := getattr(flat, "_mp_shard", None)) is not None:
        low.untyped_storage().resize_(0)
    handle._use_sharded_flat_param()
    if handle._use_orig_params:
        handle._use_sharded_views()
    handle._training_state, unit.training_state = HandleTrainingState.IDLE, TrainingState.IDLE
    handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = handle._prefetched = False
    handle._post_forward_index = None
