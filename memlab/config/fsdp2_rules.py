"""What the engine fsdp2 refuses: torch's FSDP2 and FSDP, transformers' models, and NeMo Automodel's own classes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.families import FAMILIES, families_with
from memlab.config.layout import Layout
from memlab.config.lora import LINEARS, NAMES_OF_TRANSFORMERS, LoRA
from memlab.config.option import EngineName, options_of
from memlab.config.routing import Routing
from memlab.config.training_state import AttnImplementation, TrainingState
from memlab.config.transformers_linears import adapted_linears, adapted_parameters
from memlab.config.validation import RuleError, refuse_beside, shortened
from memlab.config.vision import VISION_TOWERS, VisionTower

_OTHER_CLASSES = "choose transformers, or leave {} out"


class Fsdp2Rules:
    """The rules of a `Scenario` under the engine fsdp2, whose attributes these are."""

    __slots__ = ()

    architecture: Architecture
    num_layers: int
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    packed_sequences: int | None
    dtype: str
    engine: EngineName
    layout: Layout
    routing: Routing
    state: TrainingState

    def changed_among(self, *names: str) -> Iterator[tuple[str, object, bool]]:
        """Yields options of the scenario, its layout and its training state for `refuse_beside`.

        Each is refused where it differs from its default.
        """
        for name in names:
            owner: Any = next((one for one in (self, self.layout) if hasattr(one, name)), self.state)
            value = getattr(owner, name) if hasattr(owner, name) else self.state.options()[name]
            yield name, value, value != options_of(type(owner))[name].default  # type: ignore[arg-type]

    @property
    def vision_tower(self) -> VisionTower | None:
        """The tower beside the language model; None without one."""
        name = self.state.vision_tower
        return None if name is None else VISION_TOWERS[name]

    @property
    def attention_of_transformers(self) -> AttnImplementation:
        """The function of transformers that attends under engine fsdp2; with soft caps, it refuses sdpa."""
        own = self.state.attn_implementation
        return "eager" if FAMILIES[self.architecture.family].soft_caps[0] and own == "sdpa" else own

    @property
    def ranks_of_shards(self) -> int:
        """Number of ranks over which the parameters of the rank are spread: with FSDP2 those of a replica."""
        if self.engine != "fsdp2":
            return 1
        return self.layout.data_parallel_size * self.layout.context_parallel_size // self.state.dp_replicate_size

    @property
    def ranks_of_expert_shards(self) -> int:
        """Number of ranks over which the experts of the rank are spread, beside those that have other experts."""
        return max(1, self.ranks_of_shards // self.layout.expert_model_parallel_size)

    def check_on_fsdp2(self) -> None:
        """Checks the model, and how it is spread over ranks.

        Raises:
            ValueError: If the engine does not build the model, or memlab does not predict its options together.
        """
        family = FAMILIES[self.architecture.family]
        if not (family.fsdp2 or (family.automodel and self.state.model_classes != "transformers")):
            own = ", or NeMo Automodel's own classes with model_classes automodel" * family.automodel
            raise RuleError(
                f"engine is {self.engine!r}, and {self.architecture.name} is of the family {self.architecture.family}, "
                f"which this engine does not build yet: choose a model of {', '.join(families_with('fsdp2'))}{own}, or "
                "engine 'megatron'",
                "engine",
            )
        if self.architecture.moe_latent_size:
            raise RuleError(
                f"engine is {self.engine!r} with moe_latent_size {self.architecture.moe_latent_size}, which memlab has "
                "with Megatron only: choose engine 'megatron'",
                "engine",
            )
        if self.architecture.routes and self.dtype != "bf16":
            # ``_grouped_mm`` with CUDA's kernel (``_meta_grouped_mm_common`` in torch/_meta_registrations.py, 2.13).
            raise RuleError(
                f"dtype is {self.dtype!r} with engine {self.engine!r} and experts, must be 'bf16', the only type that "
                "torch's product of all experts takes: choose bf16, with fp32_sharded_params for parameters in fp32",
                *("dtype", "engine"),
            )
        self._check_version_1()
        self._check_model_classes()
        self._check_spread_experts()
        self._check_shared_sequences()
        self._check_stages()
        if self.layout.tensor_model_parallel_size > 1:
            self._check_divided_model()
        self._check_vision_tower()
        if self.state.adam_implementation == "te_fused" and self.state.fsdp_cpu_offload:
            raise RuleError(
                "adam_implementation is 'te_fused' with fsdp_cpu_offload, must be another, since Transformer Engine's "
                "FusedAdam has no kernel for the CPU: choose foreach, or leave fsdp_cpu_offload out",
                *("adam_implementation", "fsdp_cpu_offload"),
            )
        replicas = self.state.dp_replicate_size
        ranks = self.layout.data_parallel_size * self.layout.context_parallel_size
        if ranks % replicas:
            raise RuleError(
                f"dp_replicate_size is {replicas}, must divide the {ranks} ranks of data and context parallelism, so "
                "that each group has all shards: choose another",
                *("dp_replicate_size", "data_parallel_size"),
            )
        of_layers = self.state.reshard_after_forward_ranks or 1
        if self.ranks_of_shards % of_layers:
            raise RuleError(
                f"reshard_after_forward_ranks is {of_layers}, must divide the {self.ranks_of_shards} ranks that have "
                "shards, by a rule of torch's fully_shard: choose another, or leave it out",
                *("reshard_after_forward_ranks", "dp_replicate_size", "data_parallel_size"),
            )

    def _check_vision_tower(self) -> None:
        tower, state, model = self.vision_tower, self.state, self.architecture
        if tower is None:
            return
        given, images = f"vision_tower is {state.vision_tower!r}", state.images_per_sequence
        if (model.hidden_size, model.family) != (tower.width, ARCHITECTURES[tower.language_model].family):
            raise RuleError(
                f"{given} with {model.name}, must be beside {tower.language_model}, whose width and layers it is made "
                "for: choose it, or leave vision_tower out",
                *("vision_tower", "architecture"),
            )
        if images is None:
            raise RuleError(
                f"{given} and images_per_sequence is not given, which the data decides: give the number of images of "
                "the samples with the most",
                *("images_per_sequence", "vision_tower"),
            )
        patches = state.patches_per_image
        if (patches is None) is (tower.patches_of_image is None) or (patches or 0) % tower.patches_of_token:
            rule = "be left out, since this tower scales each image to one size"
            if tower.patches_of_image is None:
                rule = f"be given, a multiple of {tower.patches_of_token}: the data decides the size of images"
            raise RuleError(
                f"patches_per_image is {patches} with {given}, must {rule}: correct it",
                *("patches_per_image", "vision_tower"),
            )
        tokens = images * (tower.tokens_of_image(patches) + 1)
        if tokens > self.seq_length:
            raise RuleError(
                f"images_per_sequence is {images}, whose {tokens} tokens, with one behind each, must fit into the "
                f"{self.seq_length} of a sequence: choose fewer images, or a longer seq_length",
                *("images_per_sequence", "seq_length"),
            )
        sizes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        loss = state.loss_of_transformers
        others = (
            *self.changed_among(*sizes, "packed_sequences"),
            *self.changed_among("fsdp_version", "fsdp_cpu_offload", "dtype", "model_classes"),
            ("attn_implementation", state.attn_implementation, state.attn_implementation == "flash_attention_2"),
            ("loss_of_transformers", loss, loss not in ("cross_entropy", "masked_cross_entropy")),
        )
        refuse_beside(f"{given} with", "vision_tower", others, "leave {} out, or vision_tower")

    def _check_version_1(self) -> None:
        state, ahead = self.state, self.state.fsdp2_forward_prefetch_depth
        if state.fsdp_version == 2:
            return
        others = (
            *self.changed_among("tensor_model_parallel_size", "fsdp_cpu_offload", "lora_fsdp2_library"),
            ("adam_implementation", "te_fused", state.adam_implementation == "te_fused"),
            *self.changed_among("reshard_after_forward_ranks", "fsdp2_backward_prefetch_depth"),
            ("fsdp2_forward_prefetch_depth", ahead, ahead > 1),
            *self.changed_among("lora_fused_experts"),
        )
        refuse_beside("fsdp_version is 1 and", "fsdp_version", others, "choose fsdp_version 2, or leave {} out")

    def _check_model_classes(self) -> None:
        kind, model, family = self.state.model_classes, self.architecture, FAMILIES[self.architecture.family]
        if kind == "transformers":
            return
        if not family.automodel:
            raise RuleError(
                f"model_classes is {kind!r}, and {model.name} is of the family {model.family}, of which NeMo "
                f"Automodel has no class: choose transformers, or a model of {', '.join(families_with('automodel'))}",
                "model_classes",
            )
        if model.routes:
            self._check_experts_of_automodel()
        shares_sequences = self.layout.sequence_parallel and self.layout.tensor_model_parallel_size > 1
        if shares_sequences and not family.norms_of_transformers:
            others = [("sequence_parallel", None, True)]
            refuse_beside(f"model_classes is {kind!r} and", "model_classes", others, _OTHER_CLASSES)

    def _check_experts_of_automodel(self) -> None:
        """Refuses what memlab does not predict beside the classes of `memlab.engines.fsdp2.automodel_experts`."""
        state, layout, model = self.state, self.layout, self.architecture
        is_plain = not (model.multi_latent_attention or model.softmax_type == "learnable")
        if not is_plain and state.attn_implementation != "te":
            raise RuleError(
                f"attn_implementation is {state.attn_implementation!r}, and {model.name} has latent attention or "
                "sinks, of which memlab has with model_classes only Transformer Engine's kernel: choose te",
                *("attn_implementation", "model_classes"),
            )
        of_august = FAMILIES[model.family].has_sinks or FAMILIES[model.family].weighs_after
        if of_august and state.model_classes == "automodel_0.7.0":
            raise RuleError(
                f"model_classes is {state.model_classes!r}, and memlab has NeMo Automodel's class of {model.name} only "
                "as in August 2026: choose automodel",
                "model_classes",
            )
        is_spread = layout.expert_model_parallel_size > 1
        others = (
            *self.changed_among("fsdp_version", "context_parallel_size", "lora_rank"),
            ("attn_implementation", state.attn_implementation, state.attn_implementation not in ("sdpa", "te")),
            ("packed_sequences", self.packed_sequences, self.packed_sequences and state.attn_implementation != "te"),
            *(self.changed_among("dp_replicate_size", "fsdp_cpu_offload") if is_spread else ()),
            ("routing", str(self.routing), is_spread and self.routing.kind in ("random", "counts")),
        )
        given = f"model_classes is {state.model_classes!r} with {self.architecture.name}, which has experts, and"
        refuse_beside(given, "model_classes", others, _OTHER_CLASSES)

    def _check_spread_experts(self) -> None:
        ranks, kind = self.layout.expert_model_parallel_size, self.state.moe_token_dispatcher_type
        given = f"expert_model_parallel_size is {ranks} with engine {self.engine!r}"
        if ranks == 1:
            if kind == "allgather":
                raise RuleError(
                    f"moe_token_dispatcher_type is {kind!r} with engine {self.engine!r} and expert_model_parallel_size "
                    "1, where no rank has tokens for another one: leave it out, or spread the experts",
                    *("moe_token_dispatcher_type", "expert_model_parallel_size"),
                )
            return
        if self.state.model_classes == "transformers":
            raise RuleError(
                f"{given} and model_classes 'transformers', must be 1, since memlab spreads only the experts of NeMo "
                "Automodel's own classes: choose 1, or another model_classes",
                *("expert_model_parallel_size", "model_classes"),
            )
        if kind == "alltoall":
            raise RuleError(
                f"{given} and moe_token_dispatcher_type {kind!r}, must be allgather or flex, the dispatchers of NeMo "
                "Automodel (torch; deepep and hybridep): choose one of them",
                *("moe_token_dispatcher_type", "expert_model_parallel_size"),
            )
        if self.ranks_of_shards % ranks:
            raise RuleError(
                f"{given}, must divide the {self.ranks_of_shards} ranks that have shards, by a rule of NeMo Automodel: "
                "choose a divisor",
                *("expert_model_parallel_size", "data_parallel_size"),
            )
        shards, model = self.ranks_of_expert_shards, self.architecture
        for name in ("hidden_size", "moe_ffn_hidden_size"):
            if getattr(model, name) % shards:
                raise RuleError(
                    f"{given}, so that {shards} ranks have shards of the same experts, a number that must divide "
                    f"{name} of {model.name}, {getattr(model, name):,}, by a rule of torch's FSDP2: choose another "
                    "number of ranks",
                    *("expert_model_parallel_size", "data_parallel_size"),
                )

    def _check_shared_sequences(self) -> None:
        state, ranks = self.state, self.layout.context_parallel_size
        if ranks == 1:
            return
        if self.architecture.window_size is not None:
            raise RuleError(
                f"context_parallel_size is {ranks} with engine {self.engine!r}, must be 1 for "
                f"{self.architecture.name}, since torch's context_parallel has no windows: choose 1",
                "context_parallel_size",
            )
        others = [
            ("tensor_model_parallel_size", None, self.layout.tensor_model_parallel_size > 1),
            ("dtype", None, self.dtype != "bf16"),
        ]
        if state.cp_comm_type == "a2a":
            self._check_ulysses()
        else:
            others += [
                ("fsdp_version", None, state.fsdp_version == 1),
                ("packed_sequences", None, self.packed_sequences is not None),
                ("attn_implementation", None, state.attn_implementation != "sdpa"),
                ("loss_of_transformers", None, state.loss_of_transformers.startswith("logprobs")),
            ]
        given = f"context_parallel_size is {ranks} with engine {self.engine!r} and"
        refuse_beside(given, "context_parallel_size", others, "choose 1, or leave {} out")

    def _check_ulysses(self) -> None:
        """Checks the rules of ``verl/utils/ulysses.py`` and ``_ulysses_flash_attention_forward`` (0.9.1)."""
        state, model, ranks = self.state, self.architecture, self.layout.context_parallel_size
        given = f"cp_comm_type is 'a2a' with engine {self.engine!r}"
        if state.attn_implementation != "flash_attention_2":
            raise RuleError(
                f"{given} and attn_implementation {state.attn_implementation!r}, must be 'flash_attention_2', around "
                "which verl exchanges heads: choose it, or cp_comm_type p2p",
                *("cp_comm_type", "attn_implementation"),
            )
        if not state.loss_of_transformers.startswith("logprobs"):
            raise RuleError(
                f"{given} and loss_of_transformers {state.loss_of_transformers!r}, must be logprobs_flash_attn or "
                "logprobs_by_row, since transformers' loss shifts the tokens of a whole row: choose one of them",
                *("cp_comm_type", "loss_of_transformers"),
            )
        if model.num_attention_heads % ranks or self.seq_length % ranks:
            raise RuleError(
                f"{given}, and context_parallel_size {ranks} must divide the {model.num_attention_heads} heads of "
                f"{model.name} (a rule of verl) and the {self.seq_length} tokens of a row: choose a divisor",
                *("context_parallel_size", "cp_comm_type"),
            )
        if self.micro_batch_size > 1:
            raise RuleError(
                f"{given} and micro_batch_size {self.micro_batch_size}, must be 1, since verl exchanges the heads of "
                "rows without padding: give packed_sequences",
                *("micro_batch_size", "cp_comm_type"),
            )

    def _check_stages(self) -> None:
        """Checks the rules of torch's schedules, and of NeMo Automodel (``validate_hf_model_for_pipeline_support``)."""
        stages, state, layout = self.layout.pipeline_model_parallel_size, self.state, self.layout
        runs, loss = state.schedule_runs, state.loss_of_transformers
        given = f"pipeline_model_parallel_size is {stages} with engine {self.engine!r}"
        if stages == 1:
            return
        if self.architecture.share_embeddings_and_output_weights:
            raise RuleError(
                f"{given}, and {self.architecture.name} has tied embeddings, which NeMo Automodel refuses to spread "
                "over stages: choose 1, or an untied model",
                *("pipeline_model_parallel_size", "engine"),
            )
        if FAMILIES[self.architecture.family].scales_embedding:
            raise RuleError(
                f"{given}, and {self.architecture.name} is of the family {self.architecture.family}, which scales what "
                "the embedding returns, and memlab does not divide into stages: choose 1, or another model",
                *("pipeline_model_parallel_size", "engine"),
            )
        if FAMILIES[self.architecture.family].output_bias:
            raise RuleError(
                f"{given}, and the output layer of {self.architecture.name} has a bias, which memlab does not divide "
                "into stages: choose 1, or another model",
                *("pipeline_model_parallel_size", "engine"),
            )
        others = (
            *self.changed_among("context_parallel_size", "expert_model_parallel_size"),
            ("model_classes", state.model_classes, self.architecture.routes and state.model_classes != "transformers"),
            *self.changed_among("fsdp_version", "fsdp_cpu_offload"),
            ("attn_implementation", "eager", self.attention_of_transformers == "eager"),
            ("loss_of_transformers", loss, loss not in ("cross_entropy", "masked_cross_entropy")),
        )
        refuse_beside(f"{given} and", "pipeline_model_parallel_size", others, "choose 1, or leave {} out")
        # Tensor parallel ranks share sequences unless it is switched off.
        divides = layout.sequence_parallel and layout.tensor_model_parallel_size > 1
        shared = [("sequence_parallel", True, divides)]
        refuse_beside(f"{given} and", "pipeline_model_parallel_size", shared, "choose 1, or set {} False")
        layers = [layout.layers_of_chunks(stage, self.num_layers) for stage in range(stages)]
        if 0 in chain(*layers):
            raise RuleError(
                f"{given} and pipeline_model_parallel_layout {shortened(layout.pipeline_model_parallel_layout)}, in "
                "which a stage has no layer, and memlab's stages of FSDP2 have at least one: give each stage a layer",
                *("pipeline_model_parallel_layout", "engine"),
            )
        if self.num_microbatches % runs or self.num_microbatches // runs < stages:
            raise RuleError(
                f"num_microbatches is {self.num_microbatches} in {runs} runs of the schedule, must be at least the "
                f"{stages} stages in each, the same number, by a rule of torch's Schedule1F1B and of NeMo Automodel: "
                f"choose {stages * runs} or more, or other schedule_runs",
                *("num_microbatches", "schedule_runs"),
            )
        of_run = self.num_microbatches // runs
        rounds = of_run // stages
        if layout.virtual_pipeline_model_parallel_size > 1 and of_run % rounds:
            raise RuleError(
                f"num_microbatches is {self.num_microbatches}, {of_run} in each of {runs} runs of the schedule, must "
                f"be a multiple of the {rounds} rounds of a run by a rule of torch's ScheduleInterleaved1F1B: choose "
                f"{rounds * stages * runs}, or other schedule_runs",
                *("num_microbatches", "schedule_runs"),
            )

    def _check_divided_model(self) -> None:
        model, size = self.architecture, self.layout.tensor_model_parallel_size
        given = f"tensor_model_parallel_size is {size} with engine {self.engine!r}"
        if not FAMILIES[model.family].fsdp2_divides or model.share_embeddings_and_output_weights:
            raise RuleError(
                f"{given}, and {model.name} is of the family {model.family}"
                f"{' with tied embeddings' * model.share_embeddings_and_output_weights}, which this engine does not "
                f"divide yet: choose an untied model of {', '.join(families_with('fsdp2_divides'))}, or 1",
                *("tensor_model_parallel_size", "engine"),
            )
        if model.num_query_groups % size:
            raise RuleError(
                f"{given}, must divide the {model.num_query_groups} query groups of {model.name}, by a rule of NeMo "
                "Automodel: choose a divisor",
                "tensor_model_parallel_size",
            )
        if self.state.loss_of_transformers.startswith("logprobs"):
            raise RuleError(
                f"{given} and loss_of_transformers {self.state.loss_of_transformers!r}, which memlab does not predict "
                "together: choose cross_entropy or masked_cross_entropy, or tensor_model_parallel_size 1",
                *("tensor_model_parallel_size", "loss_of_transformers"),
            )
        lora, divides = self.state.lora, self.layout.sequence_parallel
        if lora is not None and lora.rank % size:
            raise RuleError(
                f"{given}, must divide lora_rank {lora.rank}, since memlab does not count adapters of unequal parts: "
                "choose a divisor, or another rank",
                *("tensor_model_parallel_size", "lora_rank"),
            )
        # With both, Automodel trains the norms of layers beside adapters: its `SequenceParallelAllGatherActivation` is
        # not among the styles that ``translate_to_lora`` (distributed/parallel_styles.py) makes keep them frozen.
        options = {"sequence_parallel": divides and (bool(FAMILIES[model.family].fused_linears) or lora is not None)}
        options |= {"fsdp_cpu_offload": self.state.fsdp_cpu_offload}
        options |= {"lora_rank": lora is not None and (lora.fsdp2_library == "peft" or bool(lora.dropout))}
        for name, is_on in options.items():
            if is_on:
                raise RuleError(
                    f"{given} and {name}, which memlab does not predict together yet: leave one of the two out, with "
                    f"{name} {'False' if name != 'lora_rank' else 'None'}",
                    *("tensor_model_parallel_size", name),
                )

    def check_adapters_on_fsdp2(self, lora: LoRA) -> None:
        """Checks which linears have adapters, and of which library."""
        if lora.is_canonical:
            raise RuleError(
                f"lora_target_modules is {shortened(list(lora.target_modules))}, which are names of Megatron-Bridge's "
                f"canonical form, must be others with engine {self.engine!r}: name {', '.join(NAMES_OF_TRANSFORMERS)}",
                *("lora_target_modules", "engine"),
            )
        found = [linear.name for linear in adapted_linears(self.architecture, self.num_layers, lora)]
        of_experts = [one.module for one in adapted_parameters(self.architecture, self.num_layers, lora)]
        if lora.fused_experts and lora.fsdp2_library != "peft":
            raise RuleError(
                f"lora_fused_experts is True with lora_fsdp2_library {lora.fsdp2_library!r}, which only PEFT has: "
                "leave one of the two out",
                *("lora_fused_experts", "lora_fsdp2_library"),
            )
        if of_experts and lora.dropout:
            raise RuleError(
                f"lora_dropout is {lora.dropout} with lora_fused_experts True, must be 0 by a rule of PEFT, whose "
                "adapters of experts drop nothing: give 0, or target modules without those of experts",
                *("lora_dropout", "lora_fused_experts"),
            )
        found += of_experts
        if not found:
            raise RuleError(
                f"lora_target_modules is {shortened(list(lora.target_modules))}, which names no linear of "
                f"{self.architecture.name}, so that there is nothing to train: name {', '.join(LINEARS)}",
                "lora_target_modules",
            )
        if "lm_head" in found:
            self.check_output_layer_with_adapter(lora)
        if lora.dropout_position == "post" and lora.fsdp2_library == "peft":
            raise RuleError(
                "lora_dropout_position is 'post' with lora_fsdp2_library 'peft', must be 'pre', since PEFT drops "
                "inputs: choose it, or lora_fsdp2_library 'automodel'",
                *("lora_dropout_position", "lora_fsdp2_library"),
            )

    def check_output_layer_with_adapter(self, lora: LoRA) -> None:
        """Refuses adapters of an output layer whose weight is the embedding's, also with Megatron."""
        if self.architecture.share_embeddings_and_output_weights:
            raise RuleError(
                f"lora_target_modules is {shortened(list(lora.target_modules))}, which names the output layer of "
                f"{self.architecture.name}, whose weight is the embedding's, beside which memlab does not predict "
                "adapters: name other linears, or give lora_exclude_modules output_layer",
                *("lora_target_modules", "lora_exclude_modules"),
            )

    def check_attention_on_fsdp2(self) -> None:
        """Checks which function attends, and to what."""
        is_of_experts = self.state.model_classes != "transformers" and self.architecture.routes
        if self.state.attn_implementation == "te" and not (is_of_experts and self.dtype == "bf16"):
            raise RuleError(
                "attn_implementation is 'te', which memlab has for NeMo Automodel's own classes of models with experts "
                f"in bf16 only, and model_classes is {self.state.model_classes!r}: choose sdpa",
                *("attn_implementation", "model_classes"),
            )
        for name in ("fake_balanced_gate", "linear_implementation"):
            if name in self.state.changed() and not is_of_experts:
                raise RuleError(
                    f"{name} is {getattr(self.state, name)!r}, which memlab has for NeMo Automodel's own classes of "
                    f"models with experts only, and model_classes is {self.state.model_classes!r}: leave {name} out",
                    *(name, "model_classes"),
                )
        if self.state.attn_implementation == "flash_attention_2" and self.dtype != "bf16":
            raise RuleError(
                f"attn_implementation is 'flash_attention_2' with dtype {self.dtype!r}, must be 'sdpa' or 'eager' "
                "there, since flash-attn takes 16 bits: choose one of them, or dtype bf16",
                *("attn_implementation", "dtype"),
            )
        if self.state.attn_implementation == "flash_attention_2" and self.architecture.window_size is not None:
            raise RuleError(
                f"attn_implementation is 'flash_attention_2', and {self.architecture.name} has windows or soft caps, "
                "which memlab does not have with it: leave it out",
                "attn_implementation",
            )
        self._check_dropped_probabilities()
        self._check_mask_in_fp32()

    def _check_dropped_probabilities(self) -> None:
        """Refuses dropout of attention where whole matrices of probabilities are kept, whose masks memlab lacks."""
        if not FAMILIES[self.architecture.family].dropout.get("attention_dropout"):
            return
        given, remedy, option = "attn_implementation is 'eager'", "choose sdpa", "attn_implementation"
        if self.attention_of_transformers != "eager":
            if self.dtype != "fp32":
                return
            given, option = "dtype is 'fp32', with which sdpa keeps whole matrices of probabilities", "dtype"
            remedy = "choose bf16, with fp32_sharded_params for parameters in fp32"
        raise RuleError(
            f"{given}, and {self.architecture.name} drops probabilities of attention, which memlab does not have with "
            f"it: {remedy}",
            option,
        )

    def _check_mask_in_fp32(self) -> None:
        """Refuses sdpa with a mask in fp32, which cuDNN's kernel does not take: another kernel was not measured."""
        if self.dtype != "fp32" or self.attention_of_transformers != "sdpa":
            return
        if self.packed_sequences is not None or self.architecture.window_size is not None:
            what = "packed_sequences" if self.packed_sequences is not None else f"windows of {self.architecture.name}"
            raise RuleError(
                f"dtype is 'fp32' with attn_implementation 'sdpa' and {what}, whose mask memlab predicts in bf16 only: "
                "choose dtype bf16, with fp32_sharded_params for parameters in fp32, or attn_implementation eager",
                *("dtype", "attn_implementation", "packed_sequences"),
            )
