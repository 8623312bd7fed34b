"""Megatron's model of several kinds of layers, each of which is Mamba, attention, an MLP or experts.

Written against megatron-core 0.16.1: ``MambaModel`` in ``models/mamba/mamba_model.py``, its layers as in
``mamba_layer_specs.py`` there, with the classes of a layer provider.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from memlab.config.scenario import Scenario
from memlab.engines.megatron.layers.mamba import GroupNorm, TorchMambaMixer
from memlab.engines.megatron.layers.mamba_of_megatron import mamba_block, mamba_layer, mamba_mixer, mamba_model
from memlab.engines.megatron.layers.torch_layers import TorchProvider
from memlab.engines.megatron.megatron_versions import latent_linears_of
from memlab.upstream.patching import patched


class Layer(mamba_layer.MambaLayer):
    """Megatron's layer of Mamba, which takes and returns what a transformer layer does."""

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Any, None]:
        """Returns hidden states, and no context."""
        return super().forward(hidden_states, packed_seq_params=packed_seq_params), None


class Stack(mamba_block.MambaStack):
    """Megatron's stack of the layers of a chunk of a pipeline stage, with checkpoints under full recompute.

    0.16.1 ignores ``recompute_granularity`` ``full`` in it, and refuses interleaved stages. 0.19.2 has both, and
    checkpoints as a transformer block does (``models/hybrid/hybrid_block.py`` and ``recompute.py``).
    """

    _checkpointed_forward = TransformerBlock._checkpointed_forward

    def __init__(self, *arguments: Any, own_layers: str, **named: Any) -> None:
        self._own_layers = own_layers
        super().__init__(*arguments, **named)

    def _select_layers_for_pipeline_parallel(self, layer_type_list: list[str]) -> tuple[int, list[str]]:
        return 0, [*self._own_layers]

    def _get_layer(self, number: int) -> Any:
        return self.layers[number]

    def forward(self, hidden_states: Any, attention_mask: Any, **named: Any) -> Any:
        """Runs the layers, and on the last stage the norm before the output layer."""
        if self.config.recompute_granularity != "full" or not self.training:
            return super().forward(hidden_states, attention_mask, **named)
        hidden_states = self._checkpointed_forward(
            hidden_states if self.pre_process else self.input_tensor,
            attention_mask,
            *(None, None),
            named.get("rotary_pos_emb"),
            *(None, named.get("packed_seq_params")),
            use_inner_quantization_context=bool(self.config.fp8),
        )
        return self.final_norm(hidden_states) if self.post_process else hidden_states


def hybrid_model(scenario: Scenario, config: TransformerConfig, provider: type, chunk: int, place: Any) -> Any:
    """Builds Megatron's MambaModel: one of the chunks of this rank's pipeline stage.

    Args:
        scenario: Of a model with a pattern of layers.
        provider: Of the classes of linears, norms and attention; without a GPU it is memlab's, and the kernels too.
        place: ``vp_stage``, where stages are interleaved.
    """
    model = scenario.architecture
    pattern = model.hybrid_override_pattern
    assert pattern is not None, "the caller asks only for models that have one"
    own_layers = "".join(pattern[layer] for layer in scenario.chunks_of_rank[chunk])
    stands_in = issubclass(provider, TorchProvider)
    mixer, context = "megatron.core.ssm.mamba_mixer", "megatron.core.ssm.mamba_context_parallel"
    replaced: dict[str, Any] = {"megatron.core.ssm.mamba_block.TENorm": provider().layer_norm(rms_norm=True)}
    if stands_in:
        replaced |= dict.fromkeys((f"{mixer}.HAVE_MAMBA_SSM", f"{mixer}.HAVE_EINOPS", f"{context}.HAVE_EINOPS"), True)
        replaced[f"{mixer}.ExtendedRMSNorm"] = GroupNorm
    with patched(replaced | latent_linears_of(provider)):
        return mamba_model.MambaModel(
            config=config,
            mamba_stack_spec=_stack(
                model.num_moe_experts, provider(), TorchMambaMixer if stands_in else mamba_mixer.MambaMixer, place,
                own_layers,
            ),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_position_embeddings or scenario.seq_length,
            hybrid_override_pattern=pattern[: scenario.num_layers],
            share_embeddings_and_output_weights=scenario.shares_embeddings,
            position_embedding_type=model.position_embedding_type,
            rotary_base=int(model.rotary_base),
            rotary_percent=model.rotary_percent,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place),
        )  # fmt: skip


def _stack(num_experts: int | None, layers: Any, mixer: type, place: dict[str, Any], own_layers: str) -> ModuleSpec:
    """Returns what ``mamba_layer_specs.py`` has, with the classes of a provider."""
    normalised, row = layers.column_parallel_layer_norm_linear(), layers.row_parallel_linear()
    of_mamba = mamba_mixer.MambaMixerSubmodules(in_proj=normalised, out_proj=row)
    of_attention = SelfAttentionSubmodules(
        linear_qkv=normalised, core_attention=layers.core_attention(), linear_proj=row
    )
    attention = ModuleSpec(
        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=of_attention
    )
    experts = None
    if num_experts is not None:
        experts = ModuleSpec(
            module=MoETransformerLayer,
            params=place,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=layers.layer_norm(rms_norm=True),
                mlp=get_moe_module_spec_for_backend(layers, num_experts, moe_grouped_gemm=True),
                mlp_bda=get_bias_dropout_add,
            ),
        )
    kinds = {
        "mamba_layer": ModuleSpec(
            module=Layer,
            submodules=mamba_layer.MambaLayerSubmodules(
                mixer=ModuleSpec(module=mixer, submodules=of_mamba), mamba_bda=get_bias_dropout_add
            ),
        ),
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            params=place,
            submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=get_bias_dropout_add),
        ),
        "mlp_layer": ModuleSpec(
            module=TransformerLayer,
            params=place,
            submodules=TransformerLayerSubmodules(
                mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=normalised, linear_fc2=row)),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    }
    if experts is not None:
        kinds["moe_layer"] = experts
    return ModuleSpec(
        module=Stack, params={"own_layers": own_layers}, submodules=mamba_block.MambaStackSubmodules(**kinds)
    )
