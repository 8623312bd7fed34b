"""The linears of Hugging Face's models that adapters can be added to: their names and sizes, without torch.

Names are those of transformers' modules (``models/llama/modeling_llama.py``, ``models/phi3/modeling_phi3.py``, 5.24).
Its experts and routers are parameters and no linears, which PEFT adapts by other means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memlab.config.architectures import Architecture
from memlab.config.families import FAMILIES
from memlab.config.lora import OF_PARAMETERS, OF_TRANSFORMERS, ROUTER, LoRA


class Linear(NamedTuple):
    """A linear of the model."""

    name: str
    """In the model, such as ``model.layers.0.self_attn.q_proj``."""
    outputs: int
    inputs: int


class AdaptedParameter(NamedTuple):
    """A parameter of experts or of a router, to which an adapter of PEFT is added before the module computes with it.

    The adapter's two matrices are those of linears from `inputs` to `rank` times `num_experts` and on to `outputs`.
    """

    module: str
    """In the model, such as ``model.layers.0.mlp.experts``."""
    name: str
    rank: int
    num_experts: int
    """Number of experts; of a router 1."""
    outputs: int
    inputs: int

    @property
    def elements(self) -> int:
        """Number of elements of both matrices."""
        return self.rank * self.num_experts * (self.outputs + self.inputs)


def adapted_parameters(architecture: Architecture, num_layers: int, lora: LoRA) -> Iterator[AdaptedParameter]:
    """Yields the parameters that have adapters, each layer's in the order in which PEFT wraps their modules.

    A parameter that stands for two linears of an expert has an adapter of twice the rank.
    """
    if not names_of_experts(architecture, lora):
        return
    names = FAMILIES[architecture.family].linears_of_expert
    hidden, inner, count = architecture.hidden_size, architecture.moe_ffn_hidden_size, architecture.num_moe_experts or 0
    shapes = {"gate_up_proj": (names[:2], 2 * inner, hidden), "down_proj": (names[2:], hidden, inner)}
    for number in range(num_layers):
        mlp = f"model.layers.{number}.mlp"
        for parameter, (shared, outputs, inputs) in shapes.items():
            if lora.adapts_experts(parameter, shared):
                yield AdaptedParameter(f"{mlp}.experts", parameter, len(shared) * lora.rank, count, outputs, inputs)
        if lora.adapts_router():
            yield AdaptedParameter(f"{mlp}.gate", "weight", lora.rank, 1, count, hidden)


def names_of_experts(architecture: Architecture, lora: LoRA) -> tuple[str, ...]:
    """Returns the names of target modules that stand for experts and routers which are parameters."""
    names = FAMILIES[architecture.family].linears_of_expert
    if not (lora.fused_experts and architecture.routes and names):
        return ()
    return (*names, *OF_PARAMETERS.values(), ROUTER)


def adapted_linears(architecture: Architecture, num_layers: int, lora: LoRA) -> Iterator[Linear]:
    """Yields the linears that have adapters."""
    for linear in linears(architecture, num_layers):
        if lora.adapts_module(linear.name):
            yield linear


def own_names(architecture: Architecture, names: Iterable[str]) -> tuple[str, ...]:
    """Returns names of linears as the model of transformers has them, in place of Megatron's; patterns stay."""
    found = {linear.name.rpartition(".")[2] for linear in linears(architecture, 1)}
    names_of_model = [OF_TRANSFORMERS.get(name, (name,)) for name in names]
    return tuple(own for one in names_of_model for own in one if own in found or len(one) == 1)


def state_dict_sizes(architecture: Architecture, num_layers: int) -> Iterator[tuple[str, int]]:
    """Yields module and elements of a model's parameters in the order of its state dict.

    Of vectors there are the norms before a layer's halves and before the output layer. The experts of a layer are two
    parameters. An output layer that is tied to the embedding is in the state dict too.
    """
    hidden = architecture.hidden_size
    yield "model.embed_tokens", architecture.vocab_size * hidden
    by_layer: dict[str, list[Linear]] = {}
    for linear in linears(architecture, num_layers):
        by_layer.setdefault(linear.name.partition(".self_attn")[0].partition(".mlp")[0], []).append(linear)
    for layer, own in by_layer.items():
        if layer == "lm_head":
            yield "model.norm", hidden
        yield from ((linear.name, linear.outputs * linear.inputs) for linear in own)
        if layer != "lm_head":
            if architecture.routes:
                one = (architecture.num_moe_experts or 0) * architecture.moe_ffn_hidden_size * hidden
                yield f"{layer}.mlp.experts.gate_up_proj", 2 * one
                yield f"{layer}.mlp.experts.down_proj", one
            yield f"{layer}.input_layernorm", hidden
            yield f"{layer}.post_attention_layernorm", hidden


def linears(architecture: Architecture, num_layers: int) -> Iterator[Linear]:
    """Yields the linears of a model's first layers, and its output layer."""
    sizes = architecture
    queries, groups = sizes.num_attention_heads * sizes.kv_channels, sizes.num_query_groups * sizes.kv_channels
    hidden, inner = sizes.hidden_size, sizes.ffn_hidden_size
    fused = FAMILIES[sizes.family].fused_linears
    if "qkv_proj" in fused:
        attention = {"qkv_proj": (queries + 2 * groups, hidden)}
    else:
        attention = {"q_proj": (queries, hidden), "k_proj": (groups, hidden), "v_proj": (groups, hidden)}
    of_mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    if "gate_up_proj" in fused:
        of_mlp = {"gate_up_proj": (2 * inner, hidden)}
    if not sizes.gated_linear_unit:
        del of_mlp["gate_proj"]
    own = FAMILIES[sizes.family].own_linears
    attention |= {"o_proj": (hidden, queries)}
    of_layer = {f"self_attn.{own.get(name, name)}": shape for name, shape in attention.items()}
    if not sizes.routes:
        of_mlp |= {"down_proj": (hidden, inner)}
        of_layer |= {f"mlp.{own.get(name, name)}": shape for name, shape in of_mlp.items()}
    for number in range(num_layers):
        for name, (outputs, inputs) in of_layer.items():
            yield Linear(f"model.layers.{number}.{name}", outputs, inputs)
    yield Linear("lm_head", sizes.vocab_size, hidden)
