"""Low-rank adapters on a Megatron model, as Megatron-Bridge adds them, beside a frozen model.

Written after ``peft/utils.py`` (``ParallelLinearAdapter``), ``peft/lora_layers.py`` (``LoRALinear``) and
``peft/recompute.py`` of Megatron-Bridge 0.6.2: its adapters consist of Megatron-Core's own parallel linears. What they
save for backward is then Megatron-Core's, on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.config.lora import EXTRA_LAYER, EXTRA_LAYERS, OUTPUT_LAYER, LoRA, rows_of_part
from memlab.config.parts.mtp import joining_weights
from memlab.config.parts.part import Weight
from memlab.config.scenario import Scenario
from memlab.engines.megatron.megatron_versions import name_of_inner_layer


def add_adapters(model: GPTModel, scenario: Scenario, provider: Any, chunk: int) -> None:
    """Freezes a model chunk and adds the adapters of the scenario's training state to its linears.

    Args:
        model: Before Megatron's DDP wraps it, so that only adapters are in its buffers.
        chunk: Which of the chunks of the rank's pipeline stage it is.
    """
    lora = scenario.state.lora
    assert lora is not None, "the caller asks only for adapters that there are"
    for parameter in model.parameters():
        parameter.requires_grad = False
    for weight, name in [*_adapted(model, scenario, chunk)]:
        _wrap(model, weight, name, scenario, provider())
    if model.post_process and scenario.state.num_labels is not None:
        # verl makes a critic's head after the adapters (utils/megatron_utils.py, 1dda039b), and ms-swift has PEFT train
        # a copy (``get_modules_to_save`` in swift/megatron/utils/utils.py, 3602360).
        model.output_layer.requires_grad_(True)
    if lora.enable_input_require_grads and hasattr(model, "embedding"):
        # ``enable_input_require_grads`` of transformers, which ms-swift calls: also for multi-token prediction.
        model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_(torch.is_grad_enabled()))
    model.decoder.register_forward_pre_hook(partial(_require_gradient, model.config), with_kwargs=True)


def _adapted(model: GPTModel, scenario: Scenario, chunk: int) -> Iterator[tuple[Weight, str]]:
    """Yields the weights of a chunk's linears that have adapters, with the linears' names, those of layers in order."""
    architecture, lora = scenario.architecture, scenario.state.lora
    assert lora is not None, "the caller asks only for adapters that there are"
    for number, layer in enumerate(scenario.chunks_of_rank[chunk]):
        for part in architecture.parts_of(layer):
            yield from lora.adapted(number, part.weights())
    joining = joining_weights(architecture.hidden_size, architecture.normalization)
    for number, layer in enumerate(model.mtp.layers if getattr(model, "mtp_process", False) else ()):
        inner = name_of_inner_layer(layer)
        yield from lora.adapted(number, joining, EXTRA_LAYERS)
        for part in architecture.parts_of(scenario.num_layers - 1):
            for weight, name in lora.adapted(number, part.weights(), EXTRA_LAYER):
                yield weight, name.replace("transformer_layer", inner)
    if model.post_process and lora.adapts(OUTPUT_LAYER):
        yield architecture.output_weight, OUTPUT_LAYER


def _wrap(model: GPTModel, weight: Weight, name: str, scenario: Scenario, provider: Any) -> None:
    architecture, lora = scenario.architecture, scenario.state.lora
    assert lora is not None, "the linear has an adapter"
    own = replace(lora, rank=lora.rank_of(weight, architecture, scenario.layout))
    rows = {part: rows_of_part(part, architecture, weight.shape[0]) for part in lora.parts(name)}
    model.set_submodule(name, AdaptedLinear(model.get_submodule(name), weight, rows, own, model.config, provider))


def _require_gradient(config: TransformerConfig, _block: Any, args: Any, kwargs: Any) -> Any:
    # Megatron's checkpoint runs backward only if one of its inputs requires a gradient, and the output of a frozen
    # embedding does not (`maybe_enable_recompute_inputs_grad` in peft/recompute.py).
    given, wanted = kwargs.get("hidden_states"), config.recompute_method is not None
    if not wanted or given is None or given.requires_grad or not torch.is_grad_enabled():
        return None
    return args, kwargs | {"hidden_states": given.detach().requires_grad_(True)}


class AdaptedLinear(torch.nn.Module):
    """A frozen linear and its adapter, whose outputs are added.

    Args:
        weight: What the linear's weight is in the whole model.
        rows: Those of each part that has an adapter of its own; of a whole linear none.
    """

    def __init__(
        self,
        to_wrap: torch.nn.Module,
        weight: Weight,
        rows: Mapping[str, int],
        lora: LoRA,
        config: TransformerConfig,
        provider: Any,
    ) -> None:
        super().__init__()
        self.is_on = True
        """Whether the adapter's output is added."""
        self.to_wrap, is_of_bridge = to_wrap, lora.library == "megatron_bridge"
        returns_its_input = hasattr(to_wrap, "return_layernorm_output")
        if returns_its_input:  # fused with the norm before it: the adapter reads what the norm has made
            to_wrap.return_layernorm_output = True  # type: ignore[assignment]
            to_wrap.return_layernorm_output_gathered = is_of_bridge and config.sequence_parallel  # type: ignore[assignment]
        if not is_of_bridge:
            self.adapter: torch.nn.Module = EngineAdapter(to_wrap, weight, lora, config, provider)
        elif weight.num_experts and not lora.share_expert_adapters:
            self.adapter = GroupedAdapter(to_wrap, weight, lora, config)
        elif rows:
            self.adapter = CanonicalAdapter(weight, rows, lora, config, gathers=not returns_its_input)
        else:
            self.adapter = Adapter(weight, lora, config, gathers=not returns_its_input)

    def forward(self, inputs: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps as the linear does; returns its bias too, where Megatron adds that."""
        output, bias = self.to_wrap(inputs, *args, **named)
        if isinstance(output, tuple):
            output, inputs = output
        if not self.is_on:
            return output, bias
        return output + self.adapter(inputs.contiguous(), *args).reshape(output.shape), bias


@contextmanager
def without_adapters(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Lets the adapted ones among modules map as their linears alone do in the block."""
    adapted = [module for module in modules if isinstance(module, AdaptedLinear)]
    for linear in adapted:
        linear.is_on = False
    try:
        yield
    finally:
        for linear in adapted:
            linear.is_on = True


def base_of(linear: torch.nn.Module) -> Any:
    """Returns the linear itself, without its adapter."""
    return linear.to_wrap if isinstance(linear, AdaptedLinear) else linear


class Adapter(torch.nn.Module):
    """Two linears of low rank.

    Args:
        weight: What the weight of the adapted linear is in the whole model.
        gathers: Whether it gathers its input under sequence parallelism, where the linear does not.
    """

    def __init__(self, weight: Weight, lora: LoRA, config: TransformerConfig, *, gathers: bool) -> None:
        super().__init__()
        (outputs, inputs), is_row = weight.shape, weight.split == 1
        self.is_expert = bool(weight.num_experts)
        self.scale, self.dropout, self.dropout_position = lora.alpha / lora.rank, lora.dropout, lora.dropout_position
        is_parallel = config.sequence_parallel and not self.is_expert
        # Megatron-Bridge's adapter of a linear that each rank has whole gathers no tokens, although ranks share its
        # rows and gather what those make: of the tokens of several ranks.
        self.gathers = is_parallel and gathers and weight.split == 0
        self.scatters = is_parallel and is_row
        self.ranks_of_expert = config.expert_tensor_parallel_size
        groups = parallel_state
        self.group = (
            groups.get_expert_tensor_parallel_group() if self.is_expert else groups.get_tensor_model_parallel_group()
        )
        common: dict[str, Any] = {
            "config": config, "bias": False, "is_expert": self.is_expert, "tp_group": self.group,
        }  # fmt: skip
        was_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            if is_row:
                self.linear_in: Any = RowParallelLinear(
                    inputs, lora.rank, input_is_parallel=True, skip_bias_add=True, init_method=_xavier, **common
                )
            else:
                self.linear_in = ColumnParallelLinear(
                    inputs, lora.rank, gather_output=True, disable_grad_reduce=was_parallel, init_method=_xavier,
                    **common,
                )  # fmt: skip
            self.linear_out: Any = ColumnParallelLinear(
                lora.rank, outputs, gather_output=weight.split != 0, init_method=_zero, **common
            )
        finally:
            config.sequence_parallel = was_parallel
        if self.is_expert and config.expert_model_parallel_size > 1:
            _share_over_ranks(self.linear_in.weight, self.linear_out.weight)

    def forward(self, inputs: torch.Tensor, *_: Any) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        rows = inputs
        if self.dropout_position == "pre":
            rows = _dropped(rows, self)
        padding = -len(rows) % self.ranks_of_expert if self.is_expert else 0
        if padding:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        if self.gathers:
            rows = gather_from_sequence_parallel_region(rows, group=self.group)
        rows, _ = self.linear_in(rows)
        rows, _ = self.linear_out(rows)
        if self.scatters:
            rows = scatter_to_sequence_parallel_region(rows, group=self.group)
        if self.dropout_position == "post":
            rows = _dropped(rows, self)
        rows = rows * self.scale
        return rows[:-padding] if padding else rows


class CanonicalAdapter(torch.nn.ModuleDict):
    """An adapter for each part of a fused linear, whose outputs are put together as the linear's.

    As in ``LoRALinearSplitQKV`` and ``LoRALinearSplitFC1UpGate`` (``peft/canonical_lora.py`` of Megatron-Bridge 0.6.2).

    Args:
        weight: What the weight of the fused linear is in the whole model.
        rows: Those of each part.
        gathers: As of each `Adapter`.
    """

    def __init__(
        self, weight: Weight, rows: Mapping[str, int], lora: LoRA, config: TransformerConfig, *, gathers: bool
    ) -> None:
        parts = {part: replace(weight, shape=(count, weight.shape[1])) for part, count in rows.items()}
        super().__init__(
            {
                f"adapter_{name.rpartition('_')[2]}": Adapter(part, lora, config, gathers=gathers)
                for name, part in parts.items()
            }
        )
        self.heads = config.num_attention_heads, config.num_query_groups, config.kv_channels

    def forward(self, inputs: torch.Tensor, *_: Any) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]; of attention, the heads of each query group are beside each other."""
        outputs = [adapter(inputs) for adapter in self.values()]
        if "adapter_q" not in self:
            return torch.cat(outputs, dim=-1)
        (heads, groups, channels), leading = self.heads, outputs[0].shape[:-1]
        # Where tensor parallel ranks share the heads, a row here has those of several tokens, in the right order.
        query, key, value = (
            output.reshape(-1, count, channels) for output, count in zip(outputs, (heads, groups, groups), strict=True)
        )
        each, pieces = heads // groups, []
        for group in range(groups):
            pieces += [
                query[:, group * each : (group + 1) * each],
                key[:, group : group + 1],
                value[:, group : group + 1],
            ]
        return torch.cat(pieces, dim=1).reshape(*leading, -1)


class GroupedAdapter(torch.nn.Module):
    """An adapter for each expert of a rank, whose weights are two tensors of all of them.

    As in ``GroupedExpertLinearAdapter`` (``peft/utils.py`` of Megatron-Bridge 0.6.2): torch multiplies the rows of all
    experts at once where all sizes are multiples of 8. Megatron-Bridge does so on GPUs only, memlab on each backend.

    Args:
        weight: What the weight of one of them is.
    """

    def __init__(self, to_wrap: torch.nn.Module, weight: Weight, lora: LoRA, config: TransformerConfig) -> None:
        super().__init__()
        (outputs, inputs), like = weight.shape, next(to_wrap.parameters())
        count: Any = to_wrap.num_gemms
        self.scale, self.dropout, self.dropout_position = lora.alpha / lora.rank, lora.dropout, lora.dropout_position
        self.linear_in = GroupedWeight(like.new_empty(count, lora.rank, inputs), _xavier)
        self.linear_out = GroupedWeight(like.new_empty(count, outputs, lora.rank), _zero)
        spreads = config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1
        for one in (self.linear_in, self.linear_out):
            one.weight.allreduce = not spreads  # type: ignore[attr-defined]
        is_even = all(size % 8 == 0 for size in (inputs, outputs, lora.rank))
        self.is_grouped = is_even and like.dtype == torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm")

    def forward(self, inputs: torch.Tensor, tokens_per_expert: list[int]) -> torch.Tensor:
        """Maps [rows, inputs] to [rows, outputs], `tokens_per_expert` rows for each expert in turn."""
        rows = _dropped(inputs, self) if self.dropout_position == "pre" else inputs
        if not len(rows):
            first = self.linear_in().reshape(-1)[0] + self.linear_out().reshape(-1)[0]
            return (rows.new_empty(0, self.linear_out.weight.shape[1]) + first * 0.0) * self.scale
        multiply = self._together if self.is_grouped else self._in_turn
        return multiply(rows, tokens_per_expert) * self.scale

    def _together(self, rows: torch.Tensor, tokens_per_expert: list[int]) -> torch.Tensor:
        active = [number for number, count in enumerate(tokens_per_expert) if count]
        parts = [part for part in rows.split(tokens_per_expert) if len(part)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        counts = [tokens_per_expert[number] for number in active]
        ends = torch.tensor(counts, device=rows.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for linear in (self.linear_in, self.linear_out):
            rows = torch.nn.functional.grouped_mm(rows, linear(active).transpose(1, 2), offs=ends)
        return _dropped(rows, self) if self.dropout_position == "post" else rows

    def _in_turn(self, rows: torch.Tensor, tokens_per_expert: list[int]) -> torch.Tensor:
        first, second, outputs = self.linear_in(), self.linear_out(), []
        for number, part in enumerate(rows.split(tokens_per_expert)):
            hidden = torch.nn.functional.linear(part, first[number])
            output = torch.nn.functional.linear(hidden, second[number])
            outputs.append(_dropped(output, self) if self.dropout_position == "post" else output)
        return torch.cat(outputs)


class GroupedWeight(torch.nn.Module):
    """The weights of one linear of all experts, in a module whose forward pass DDP can wait before."""

    def __init__(self, weight: torch.Tensor, initialize: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        with torch.no_grad():
            initialize(self.weight)

    def forward(self, experts: list[int] | None = None) -> torch.Tensor:
        """Returns the weights of all experts, or copies those of some."""
        return self.weight if experts is None else self.weight[torch.tensor(experts, device=self.weight.device)]


class EngineAdapter(torch.nn.Module):
    """An adapter whose two linears are Transformer Engine's; of experts, one for each expert of the rank.

    As ms-swift adds them (``LoraParallelLinear`` in ``tuners/lora.py`` of mcore-bridge 1.6.5): that linear is parallel
    which has the side that the adapted linear splits, and each rank has the other one whole; both, of a linear that it
    has whole. Experts have grouped linears of the class of the adapted one, and no expert tensor parallelism.
    In FP8 they compute in FP8 too, unless the model's parameters are in FP8.

    Args:
        weight: What its weight is in the whole model.
    """

    def __init__(
        self, to_wrap: torch.nn.Module, weight: Weight, lora: LoRA, config: TransformerConfig, provider: Any
    ) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.scale, self.dropout, self.dropout_position = lora.alpha / lora.rank, lora.dropout, lora.dropout_position
        common: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": False}
        own = _class_outside_fp8 if config.fp8_param else lambda kind: kind
        self.leaves_fp8 = bool(config.fp8_param) and own(provider.linear()) is provider.linear()
        """Whether its linears are Transformer Engine's, which compute in FP8 unless that is switched off."""
        if weight.num_experts:
            grouped, count = own(type(to_wrap)), to_wrap.num_gemms
            self.linear_in: Any = grouped(count, inputs, lora.rank, is_expert=True, init_method=_xavier, **common)
            self.linear_out: Any = grouped(count, lora.rank, outputs, is_expert=True, init_method=_zero, **common)
            return
        common["is_expert"] = False
        whole = partial(
            own(provider.linear()), parallel_mode="duplicated", skip_weight_param_allocation=False, **common
        )  # fmt: skip
        if weight.split == 1:
            parallel = partial(own(provider.row_parallel_linear()), input_is_parallel=True, **common)
            self.linear_in = parallel(inputs, lora.rank, init_method=_xavier)
            self.linear_out = whole(lora.rank, outputs, init_method=_zero)
        else:
            parallel = partial(own(provider.column_parallel_linear()), gather_output=False, **common)
            self.linear_in = whole(inputs, lora.rank, init_method=_xavier)
            second = whole if weight.split is None else parallel
            self.linear_out = second(lora.rank, outputs, init_method=_zero)

    def forward(self, inputs: torch.Tensor, *tokens_per_expert: Any) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]; of experts, `tokens_per_expert` rows for each expert in turn."""
        rows = _dropped(inputs, self) if self.dropout_position == "pre" else inputs
        with _fp8_switched_off() if self.leaves_fp8 else nullcontext():
            rows, _ = self.linear_in(rows, *tokens_per_expert)
            rows, _ = self.linear_out(rows, *tokens_per_expert)
        return (_dropped(rows, self) if self.dropout_position == "post" else rows) * self.scale


def _class_outside_fp8(linear: type) -> type:
    """Returns the class of linears that compute in bf16, where a fake one has another class for FP8."""
    return getattr(linear, "outside_fp8", linear)


def _fp8_switched_off() -> AbstractContextManager[None]:
    return import_module("transformer_engine.pytorch").fp8_autocast(enabled=False)


def _dropped(rows: torch.Tensor, adapter: Any) -> torch.Tensor:
    # What torch.nn.Dropout calls on a GPU; on a CPU that would keep a mask of another type.
    return torch.native_dropout(rows, adapter.dropout, True)[0] if adapter.dropout and adapter.training else rows


def _xavier(weight: torch.Tensor) -> None:
    if not weight.is_meta:  # a fake weight has no values
        torch.nn.init.xavier_normal_(weight)


def _zero(weight: torch.Tensor) -> None:
    torch.nn.init.zeros_(weight)


def _share_over_ranks(*weights: torch.nn.Parameter) -> None:
    """Keeps adapters that all experts share equal on the expert parallel ranks."""
    group = parallel_state.get_expert_model_parallel_group()
    source = torch.distributed.get_global_rank(group, 0)
    for weight in weights:
        torch.distributed.broadcast(weight.data, source, group=group)
        weight.register_hook(partial(_summed, group))


def _summed(group: Any, grad: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(grad, group=group)
    return grad
