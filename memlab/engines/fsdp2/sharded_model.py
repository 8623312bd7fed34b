"""A model that `fully_shard` has sharded as NeMo Automodel does it, with its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from memlab.config.backend_kind import BackendKind
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.engines.fsdp2.adapters import add_adapters
from memlab.engines.fsdp2.attention import name_of
from memlab.engines.fsdp2.automodel_classes import change_classes
from memlab.engines.fsdp2.automodel_experts import experts_of, spread_experts
from memlab.engines.fsdp2.context_parallel import mesh_of
from memlab.engines.fsdp2.fused_adam import FusedAdamOfShards
from memlab.engines.fsdp2.hugging_face import build_model
from memlab.engines.fsdp2.tensor_parallel import clip, divide
from memlab.engines.fsdp2.vision import language_model_of, trained_lists
from memlab.meter.labels import keeping, on_host
from memlab.meter.observers import unobserved

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LEARNING_RATE = 0.0
"""A step changes no weights, as with `memlab.engines.megatron`: every step of a lab has the same loss."""


class ShardedModel:
    """A rank's part of a model."""

    def __init__(self, scenario: Scenario, place: BackendKind) -> None:
        mesh_device = "cuda" if place.on_gpu else "cpu"
        sharded = torch.float32 if scenario.state.fp32_sharded_params else DTYPES[scenario.dtype]
        self._experts: list[Any] = []
        """The experts of layers that are sharded by themselves."""
        self._whole: list[Any] = []
        """Parameters of experts that no other rank has a part of."""
        self._embedding: list[Any] = []
        """The embedding, if it is sharded by itself."""
        self._output: list[Any] = []
        """The output layer, if it is sharded by itself."""
        torch.manual_seed(scenario.seed)
        self.attention = name_of(scenario, on_gpu=place.on_gpu, has_allocator=place.has_allocator)
        # The whole model has no part in a step, and is made under another default type than the meter expects.
        with on_host(), unobserved():
            with torch.device("meta" if place.is_prediction else "cpu"):
                self.module = build_model(scenario, sharded, attention=self.attention)
                change_classes(self.module, scenario)
                if scenario.state.lora is not None:
                    add_adapters(self.module, scenario)
                self.module = self._divide(self.module, scenario)
            self.context_parallel = mesh_of(scenario, mesh_device)
            self._shard(mesh_device, scenario)
        # The module has others while they are gathered, as those outside the layers are after a forward-only pass.
        self.parameters: list[Any] = list(self.module.parameters())
        experts_are_spread = scenario.layout.expert_model_parallel_size > 1
        self.is_divided = scenario.layout.tensor_model_parallel_size > 1 or experts_are_spread
        self.is_on_host = scenario.state.fsdp_cpu_offload
        self._to_device()
        self.set_gathering(scenario.state)
        self.optimizer: torch.optim.Optimizer | FusedAdamOfShards | None = None
        self.build_optimizer(scenario.state)

    def build_optimizer(self, state: TrainingState) -> None:
        """Gives the model an optimizer, which makes its moments in its first step."""
        kind, trained = state.adam_implementation, [each for each in self.parameters if each.requires_grad]
        if kind == "te_fused":
            self.optimizer = FusedAdamOfShards(trained, state, LEARNING_RATE)
            return
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=LEARNING_RATE,
            foreach=kind == "foreach",
            fused=kind == "fused",
        )

    def set_gathering(self, state: TrainingState) -> None:
        """Says which layers free their gathered parameters after forward, and which are gathered ahead of time."""
        which, layers, of_tower = state.reshard_after_forward, self.layers, trained_lists(self.inner)
        last = {language_model_of(root).layers[-1] for root in self.roots} | {modules[-1] for modules in of_tower}
        both = (*layers, *chain(*of_tower))
        freed = {layer: which == "all" or (which == "all_but_last" and layer not in last) for layer in both}
        freed |= {one: freed[layer] for layer in layers if (one := experts_of(layer)) in self._experts}
        freed |= dict.fromkeys(self._embedding, which != "none")
        freed |= dict.fromkeys((*self._output, *self.roots), which != "none" and state.reshard_root_after_forward)
        for unit, is_freed in freed.items():
            unit.set_reshard_after_forward(is_freed, recurse=False)
            for group in _groups(unit) if is_freed else ():
                group.post_forward_mesh_info = self._meshes_after_forward[group]
        after, before = state.fsdp2_forward_prefetch_depth, state.fsdp2_backward_prefetch_depth
        for root in self.roots:
            layers = list(language_model_of(root).layers)
            if state.reshard_root_after_forward:  # verl's ``apply_fsdp2`` goes from the embedding to the output layer
                layers = [*self._embedding, *layers, *self._output]
            for number, layer in enumerate(layers):
                layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + after])
                layer.set_modules_to_backward_prefetch(layers[max(0, number - before) : number][::-1])
        for modules in of_tower:
            for number, module in enumerate(modules):
                module.set_modules_to_forward_prefetch(modules[number + 1 : number + 1 + after])
                module.set_modules_to_backward_prefetch(modules[max(0, number - before) : number][::-1])

    def set_gradient_sync(self, is_last: bool) -> None:
        """Says whether the next backward reduces gradients."""
        for root in self.roots:
            root.set_requires_gradient_sync(is_last)

    def clip(self, max_norm: float) -> None:
        """Clips the gradients."""
        if self.is_divided:
            clip(self.parameters, max_norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, max_norm, foreach=True)

    @property
    def inner(self) -> Any:
        """Transformers' model."""
        return self.module

    @property
    def roots(self) -> list[Any]:
        """What FSDP2 takes for a whole model: several where the rank has several stages of a pipeline."""
        return [self.module]

    @property
    def layers(self) -> list[Any]:
        """The transformer layers."""
        return [layer for root in self.roots for layer in language_model_of(root).layers]

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Yields the modules of transformers' model by their names there."""
        yield from self.module.named_modules()

    def shards(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yields each parameter's shard and its gradient, as FSDP2's own objects have them."""
        for each in self.sharded():
            yield each._sharded_param_data, each.sharded_param.grad
        yield from ((each.to_local(), each.grad) for each in self._whole)

    def workspace(self) -> Iterator[torch.Tensor]:
        """Yields what is kept beside shards and optimizer state."""
        yield from self.module.buffers()

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yields the gradients of the shards, which are there from backward to the next step's `zero_grad`."""
        yield from (each.grad for each in self.parameters if each.grad is not None)

    def sharded(self) -> Iterator[Any]:
        """Yields FSDP2's own object for each parameter."""
        for module in self.module.modules():
            if hasattr(module, "_get_fsdp_state"):
                yield from (each for group in _groups(module) for each in group.fsdp_params)

    def reset(self) -> None:
        """Ends what a step has left that did not reach its end: gathered parameters, and gradients."""
        for each in self.sharded():
            if "unsharded_accumulated_grad" in vars(each):  # until torch 2.14; then it is the gradient below
                each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
        for root in self.roots:
            if hasattr(root, "reset_iter_state"):
                root.reset_iter_state()
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Drops gradients, and the state of an update that did not reach its end."""
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        for state in [state for state in self.optimizer.state.values() if "exp_avg_sq" not in state]:
            state.clear()  # Adam would take it for a complete one

    def _shard(self, mesh_device: str, scenario: Scenario) -> None:
        """Has FSDP2 shard each layer, and then the model."""
        state, mesh = scenario.state, self._spread(mesh_device, scenario)
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": _policy(scenario),
            "offload_policy": CPUOffloadPolicy() if state.fsdp_cpu_offload else OffloadPolicy(),
        }
        if state.separate_embeddings != "none" and not scenario.architecture.share_embeddings_and_output_weights:
            self._embedding = _present(language_model_of(root).embed_tokens for root in self.roots)
            if state.separate_embeddings == "both":
                self._output = _present(root.lm_head for root in self.roots)
        units = [*chain(*trained_lists(self.inner)), *self.layers, *self._embedding, *self._output, *self.roots]
        if scenario.layout.expert_model_parallel_size > 1:
            shards = spread_experts(self.layers, scenario, mesh_device)
            experts = [one for one in map(experts_of, self.layers) if one is not None]
            if shards.size() == 1:
                self._whole = [each for one in experts for each in one.parameters()]
                options["ignored_params"] = {*self._whole}
            else:
                for one in experts:
                    # There may be more ranks than experts (``_moe_shard_placement``).
                    fully_shard(one, **options | {"mesh": shards, "shard_placement_fn": lambda _: Shard(1)})
                self._experts = experts
        for unit in units:
            fully_shard(unit, reshard_after_forward=state.reshard_after_forward_ranks or True, **options)
        units += self._experts
        for root in self.roots if mesh_device == "cpu" else ():  # gloo has no average
            root.set_force_sum_reduction_for_comms(True)
        self._meshes_after_forward = {group: group.post_forward_mesh_info for unit in units for group in _groups(unit)}

    def _spread(self, mesh_device: str, scenario: Scenario) -> Any:
        """Divides matrices over tensor parallel ranks, and returns the mesh of the ranks that have shards."""
        state, tensor_ranks = scenario.state, scenario.layout.tensor_model_parallel_size
        sizes = {"pp": scenario.layout.pipeline_model_parallel_size, "dp_replicate": state.dp_replicate_size}
        sizes |= {"dp_shard": scenario.ranks_of_shards, "tp": tensor_ranks}
        named = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        mesh = init_device_mesh(mesh_device, tuple(named.values()), mesh_dim_names=tuple(named))
        self.pipeline_mesh: Any = mesh["pp"] if "pp" in named else None
        for root in self.roots if tensor_ranks > 1 else ():
            divide(root, mesh["tp"], sequences=scenario.layout.sequence_parallel)
        of_shards = tuple(name for name in named if name.startswith("dp"))
        return mesh[of_shards] if len(of_shards) < len(named) else mesh

    def _divide(self, module: Any, scenario: Scenario) -> Any:
        """Returns the rank's part of transformers' model: all of it, but for `memlab.engines.fsdp2.pipelined_model`."""
        return module

    def _to_device(self) -> None:
        """Allocates the rank's shards and the buffers where they are kept, each in a storage of its own.

        In the order of ``torch.nn.Module.to_empty``, which gives a tied matrix memory in each module that has it and
        then drops the former one. On the host, FSDP2 pins it once, afterwards
        (``FSDPParam.reset_sharded_param`` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py, torch 2.13).
        """
        place = _on_pinned_host if self.is_on_host else on_device
        of_parameter = {each.sharded_param: each for each in self.sharded()}
        tensors = chain.from_iterable(module.parameters(recurse=False) for module in self.module.modules())
        found = (of_parameter[tensor] for tensor in tensors if tensor in of_parameter)
        with keeping("parameters"):
            for each in dict.fromkeys(found) if self.is_on_host else found:
                each.device = torch.device("cuda")  # where it is gathered
                padded = place(each._sharded_param_data)
                each._sharded_param_data = padded
                size, stride = each.sharded_size, each.contiguous_sharded_stride
                each.sharded_param._local_tensor = torch.as_strided(padded, size, stride)
            for whole in self._whole:
                whole._local_tensor = place(whole._local_tensor)
        with keeping("workspace"):
            for module in self.module.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, on_device(buffer))
        # As the measured jobs do before their first step: otherwise the former memory of a tied matrix stays reserved.
        torch.cuda.empty_cache()


def _present(modules: Iterable[Any]) -> list[Any]:
    """Returns the modules that a rank has: it lacks those of other stages."""
    return [module for module in modules if module is not None and not isinstance(module, torch.nn.Identity)]


def _groups(module: Any) -> list[Any]:
    """Returns FSDP2's groups of parameters that a module gathers together: torch 2.11 has one group, 2.13 several."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _on_pinned_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor in a storage of its own on the device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda").copy_(tensor)


def _policy(scenario: Scenario) -> MixedPrecisionPolicy:
    """Returns what NeMo Automodel gives FSDP2: layers compute in ``dtype``, and gradients are reduced in fp32.

    Its release leaves the inputs of layers as they are, which are cosines and sines in fp32 (``distributed/config.py``
    of 0.7.0; 36044ad3 has torch's default there).
    """
    reduced = torch.bfloat16 if scenario.state.grad_reduce_in_bf16 else torch.float32
    casts = scenario.state.model_classes != "automodel_0.7.0"
    return MixedPrecisionPolicy(param_dtype=DTYPES[scenario.dtype], reduce_dtype=reduced, cast_forward_inputs=casts)
