"""How a job is spread over ranks: the sizes of its parallel groups, and which rank memlab steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.option import EngineName, option
from memlab.config.parts.part import SharedSize, Weight
from memlab.config.pipeline_layout import FIELD, layers_of_pipeline_chunks
from memlab.config.validation import RuleError, check_whole_number, is_whole_number, plain_whole_number, shortened

MOST_RANKS = 2**17
"""The largest job: 131,072 ranks, more than any that was run as one. Megatron makes its groups rank by rank."""
_SHORT = {
    "TP": "tensor_model_parallel_size",
    "CP": "context_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VP": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "DP": "data_parallel_size",
}
_ONE_RANK = "one rank"
_WHOLE_SEQUENCES = "SP0"
"""The word of a layout whose tensor parallel ranks have whole sequences."""
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_OF_STAGES = (*_ENDS, FIELD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of Megatron's parallel groups; a single rank by default.

    Raises:
        ValueError: If a size is not a positive whole number, or the expert groups do not fit the other ranks.
    """

    tensor_model_parallel_size: int = option(
        1, "number of ranks that share each layer's matrices (default 1)", engines=("megatron", "fsdp2")
    )
    sequence_parallel: bool = option(
        True,
        "split activations between matrices along the sequence over the tensor parallel ranks",
        engines=("megatron", "fsdp2"),
    )
    """Megatron-Core's own default is False. MoE models need it. On one tensor parallel rank it does nothing."""
    context_parallel_size: int = option(
        1, "number of ranks that share each sequence (default 1)", engines=("megatron", "fsdp2")
    )
    """Each has two chunks of a sequence, one from the front and one from the back."""
    pipeline_model_parallel_size: int = option(
        1, "number of pipeline stages (default 1)", engines=("megatron", "fsdp2")
    )
    """The schedule is 1F1B."""
    virtual_pipeline_model_parallel_size: int = option(
        1,
        "number of model chunks per stage; with 2 or more, the schedule is interleaved (default 1)",
        engines=("megatron", "fsdp2"),
    )
    """A stage has chunks from several depths of the model."""
    expert_model_parallel_size: int = option(
        1, "number of ranks that share the experts of a layer (default 1)", engines=("megatron", "fsdp2")
    )
    """They are out of those of one pipeline stage."""
    expert_tensor_parallel_size: int | None = option(
        None, "number of ranks that share the matrices of an expert (default: the tensor parallel size)"
    )
    data_parallel_size: int = 1
    """Copies of the model, each with its own batch; the distributed optimizer shards its state over them."""
    num_layers_in_first_pipeline_stage: int | None = option(
        None, "number of layers in the first stage (default: all stages have the same number)"
    )
    num_layers_in_last_pipeline_stage: int | None = option(
        None, "number of layers in the last stage (default: all stages have the same number)"
    )
    pipeline_model_parallel_layout: str | None = None
    """Which layers each chunk of each stage has (`memlab.config.pipeline_layout`); None splits them evenly, but for the
    ends. The chunks of a stage follow from it."""
    rank: int = 0
    """The rank that memlab runs, of `world_size` ranks in Megatron's order: tensor, context, data, pipeline."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("rank", "sequence_parallel", FIELD) or (value is None and field.default is None):
                continue
            object.__setattr__(self, field.name, value := plain_whole_number(value))
            check_whole_number(field.name, value, at_most=MOST_RANKS)
        if not isinstance(self.sequence_parallel, bool):
            raise RuleError(
                f"sequence_parallel is {self.sequence_parallel!r}, must be True or False: choose one of them",
                "sequence_parallel",
            )
        if self.world_size > MOST_RANKS:
            raise RuleError(
                f"the layout has {self.world_size:,} ranks ({self}), must have at most {MOST_RANKS:,} (more than "
                "any real "
                "job has): give smaller sizes"
            )
        self._check_pipeline_layout()
        if self.virtual_pipeline_model_parallel_size > 1 and self.pipeline_model_parallel_size == 1:
            raise RuleError(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline_model_parallel_size}, must be 1 where "
                "pipeline_model_parallel_size is 1: there is nothing to interleave with",
                "virtual_pipeline_model_parallel_size",
                "pipeline_model_parallel_size",
            )
        tensor, experts = self.expert_tensor_size, self.expert_model_parallel_size
        if self.ranks_of_a_stage % (tensor * experts):
            sizes = [
                size for size in range(1, self.ranks_of_a_stage + 1) if self.ranks_of_a_stage % (tensor * size) == 0
            ]
            choices = ("from " if len(sizes) > 1 else "") + ", ".join(str(size) for size in sizes)
            advice = f"choose expert_model_parallel_size {choices}" if sizes else "change expert_tensor_parallel_size"
            derived = self.expert_tensor_parallel_size is None and tensor > 1
            whose = " (without expert_tensor_parallel_size, Megatron-Core takes as many as tensor parallel ranks)"
            raise RuleError(
                f"expert_model_parallel_size {experts} x expert_tensor_parallel_size {tensor} is {experts * tensor}, "
                f"must divide the {self.ranks_of_a_stage} ranks of a stage: {advice}, or "
                f"use more ranks{whose if derived else ''}",
                "expert_model_parallel_size",
                "expert_tensor_parallel_size",
            )
        if not is_whole_number(self.rank, at_least=0) or self.rank >= self.world_size:
            raise RuleError(
                f"rank is {self.rank!r}, must be from 0 to {self.world_size - 1}, of {self.world_size} ranks "
                f"({self}): choose another rank or layout",
                "rank",
            )

    def _check_pipeline_layout(self) -> None:
        text, stages = self.pipeline_model_parallel_layout, self.pipeline_model_parallel_size
        if text is None:
            return
        if not isinstance(text, str):
            raise RuleError(f"{FIELD} is {shortened(text)}, must be a text such as 'Ett|tt|ttL': give one", FIELD)
        num_chunks, chunks = len(layers_of_pipeline_chunks(text)), self.virtual_pipeline_model_parallel_size
        if num_chunks % stages or chunks not in (1, num_chunks // stages):
            raise RuleError(
                f"{FIELD} is {shortened(text)} with {num_chunks} chunks, must have {chunks} for each of the {stages} "
                "pipeline stages: correct one of them",
                *(FIELD, "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            )
        if any(getattr(self, name) is not None for name in _ENDS):
            raise RuleError(
                f"{FIELD} is {shortened(text)} with a number of layers for the first or last stage, by a rule of "
                "Megatron-Core only one of them: leave one out",
                *_OF_STAGES,
            )
        object.__setattr__(self, "virtual_pipeline_model_parallel_size", num_chunks // stages)

    @property
    def _spread(self) -> tuple[object, ...]:
        """What the layouts that spread a job alike have in common: on one tensor parallel rank nothing is split."""
        others = (getattr(self, name) for name in self.__slots__ if name != "sequence_parallel")
        return (self.has_whole_sequences, *others)

    def __eq__(self, other: object) -> bool:
        return self._spread == other._spread if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._spread)

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole job."""
        return self.ranks_of_a_stage * self.pipeline_model_parallel_size

    @property
    def ranks_of_a_stage(self) -> int:
        """Number of ranks that have the same layers, or parts of them."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.data_parallel_size

    @property
    def pipeline_stage(self) -> int:
        """The stage that `rank` belongs to."""
        return self.rank // self.ranks_of_a_stage

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that share each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def ranks_of_exchange(self) -> int:
        """Number of ranks that exchange tokens: those that share the experts and the matrices of each."""
        return self.expert_model_parallel_size * self.expert_tensor_size

    @property
    def copies_of_parameters(self) -> int:
        """Number of ranks that have the same parameters outside experts; gradients are reduced over them."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def copies_of_experts(self) -> int:
        """Number of ranks that have the same experts, or the same parts of them."""
        return self.ranks_of_a_stage // (self.expert_tensor_size * self.expert_model_parallel_size)

    @property
    def has_whole_sequences(self) -> bool:
        """Whether several tensor parallel ranks have whole sequences between their matrices."""
        return self.tensor_model_parallel_size > 1 and not self.sequence_parallel

    @property
    def ranks_of_a_sequence(self) -> int:
        """Number of ranks that share the activations of a sequence between matrices."""
        return self.context_parallel_size * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    def layers_of_stage(self, stage: int, num_layers: int) -> int:
        """Returns how many layers a pipeline stage has, as Megatron's ``get_num_layers_to_build`` does."""
        if self.pipeline_model_parallel_layout is not None:
            return sum(self.layers_of_chunks(stage, num_layers))
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        if stage == 0 and first is not None:
            return first
        if stage == self.pipeline_model_parallel_size - 1 and last is not None:
            return last
        rest, stages = self._even(num_layers)
        return rest // stages

    def layers_of_chunks(self, stage: int, num_layers: int) -> tuple[int, ...]:
        """Returns how many layers each chunk of a stage has."""
        if self.pipeline_model_parallel_layout is not None:
            of_all = layers_of_pipeline_chunks(self.pipeline_model_parallel_layout)
            return of_all[stage :: self.pipeline_model_parallel_size]
        chunks = self.virtual_pipeline_model_parallel_size
        return (self.layers_of_stage(stage, num_layers) // chunks,) * chunks

    def with_shorter_last_stage(self, num_layers: int) -> Layout:
        """Returns the layout whose last stage has what the others leave, if that makes one layer at least.

        Example: 61 layers on 16 stages are 15 x 4 and 1, as in Megatron-Bridge's recipe of DeepSeek-V3
        (``recipes/deepseek/deepseek_v3.py``). Layers that divide, and stages with chunks or with sizes of their own,
        stay as they are.
        """
        stages, chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        last = num_layers - (stages - 1) * -(-num_layers // stages)
        has_ends = any(getattr(self, name) is not None for name in _OF_STAGES)
        if num_layers % stages == 0 or chunks > 1 or has_ends or last < 1:
            return self
        return replace(self, num_layers_in_last_pipeline_stage=last)

    def most_passes_in_flight(self, num_microbatches: int) -> int:
        """Returns the maximum number of chunk forward passes in flight at once, including the current one.

        The formula is that of ``get_pp_rank_microbatches`` (megatron/core/pipeline_parallel/schedules.py, 0.16.1),
        which runs all of them but one before the first backward.
        """
        stages, chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        after = stages - self.pipeline_stage - 1
        before_the_first_backward = after if chunks == 1 else 2 * after + (chunks - 1) * stages
        return min(before_the_first_backward + 1, num_microbatches * chunks)

    def _even(self, num_layers: int) -> tuple[int, int]:
        """Returns the number of layers, and of stages, that are split evenly."""
        given = [self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage]
        counts = [count for count in given if count is not None]
        return num_layers - sum(counts), self.pipeline_model_parallel_size - len(counts)

    def distinct_ranks(self, *, by_expert: bool) -> tuple[int, ...]:
        """Returns one rank of every kind: ranks of a stage with the same chunks and the same experts use equal memory.

        Args:
            by_expert: Whether the experts get different numbers of tokens.
        """
        first: dict[tuple[int, int], int] = {}
        for rank in range(self.ranks_of_a_stage):
            # Megatron's orders of a stage's ranks: tensor, context, data; of its experts' ranks: tensor, expert, data.
            chunks = rank // self.tensor_model_parallel_size % self.context_parallel_size
            experts = rank // self.expert_tensor_size % self.expert_model_parallel_size if by_expert else 0
            first.setdefault((chunks, experts), rank)
        stages = range(self.pipeline_model_parallel_size)
        return tuple(stage * self.ranks_of_a_stage + rank for stage in stages for rank in first.values())

    def check(
        self,
        architecture: Architecture,
        num_layers: int,
        seq_length: int,
        num_microbatches: int,
        engine: EngineName = "megatron",
    ) -> None:
        """Checks the layout against what it splits.

        Raises:
            RuleError: If a size does not divide what it splits.
        """
        tensor, context = self.tensor_model_parallel_size, self.context_parallel_size
        if context > 1 and seq_length % (2 * context):
            choices = [str(size) for size in range(1, 65) if size == 1 or seq_length % (2 * size) == 0]
            raise RuleError(
                f"context_parallel_size is {context}, must divide the {seq_length} tokens of a sequence into "
                f"{2 * context} chunks, two per rank: choose from {', '.join(choices)}",
                "context_parallel_size",
            )
        self._check_heads(architecture, seq_length)
        self._check_unshared(architecture)
        if architecture.routes and self.has_whole_sequences:
            raise RuleError(
                f"sequence_parallel is False with tensor_model_parallel_size {tensor}, must be True for "
                f"{architecture.name}, whose experts Megatron-Core does not train without it: switch it on",
                *("sequence_parallel", "tensor_model_parallel_size"),
            )
        for name, size, what, amount in (
            ("tensor_model_parallel_size", tensor, "entries of the vocabulary", architecture.vocab_size),
            (
                "tensor_model_parallel_size",
                tensor if self.sequence_parallel else 1,
                "tokens of a sequence",
                seq_length // context,
            ),
            *self._stages_and_layers(num_layers),
            *((one.ranks, self.ranks_that_share(one), one.what, one.amount) for one in architecture.shared_sizes),
        ):
            if amount % size:
                divisors = [count for count in range(1, min(amount, 128) + 1) if amount % count == 0]
                if name == "tensor_model_parallel_size":
                    divisors = self._tensor_sizes(architecture, seq_length)
                rule = f"must divide the {amount} {what} of {architecture.name}"
                uneven = _ENDS if engine == "megatron" else ("pipeline_model_parallel_layout",)
                others = uneven if what == "layers" else ()
                advice = f", or set {' and '.join(others)}" if others else ""
                raise RuleError(
                    f"{name} is {size}, {rule}: choose from {', '.join(map(str, divisors))}{advice}", name, *others
                )
        self._check_chunks(num_layers, num_microbatches)

    def ranks_that_share(self, size: SharedSize) -> int:
        """Returns how many ranks share a size of a part."""
        is_of_experts = size.ranks == "expert_tensor_parallel_size"
        return self.expert_tensor_size if is_of_experts else int(getattr(self, size.ranks))

    def shape_of(self, weight: Weight) -> tuple[int, ...]:
        """Returns the shape of a rank's part of a weight."""
        ranks = self.expert_tensor_size if weight.num_experts else self.tensor_model_parallel_size
        return tuple(size // ranks if place == weight.split else size for place, size in enumerate(weight.shape))

    def elements_of(self, weight: Weight) -> int:
        """Returns how many elements of a weight a rank has; of all its experts together."""
        return math.prod(self.shape_of(weight)) * max(1, weight.num_experts // self.expert_model_parallel_size)

    def _check_unshared(self, architecture: Architecture) -> None:
        """Refuses to divide what no part of the model has."""
        tensor, experts = self.expert_tensor_parallel_size, self.expert_model_parallel_size
        if tensor is not None and not architecture.is_divided_by("expert_tensor_parallel_size"):
            raise RuleError(
                f"expert_tensor_parallel_size is {tensor}, and {architecture.name} is dense: leave it out",
                "expert_tensor_parallel_size",
            )
        if self.expert_tensor_size > 1 and architecture.routes and architecture.add_bias_linear:
            raise RuleError(
                f"expert_tensor_parallel_size is {self.expert_tensor_size}, must be 1 for {architecture.name}, whose "
                "experts have biases, by a rule of Megatron-Core: choose 1",
                *("expert_tensor_parallel_size", "tensor_model_parallel_size"),
            )
        if experts > 1 and not architecture.is_divided_by("expert_model_parallel_size"):
            raise RuleError(
                f"expert_model_parallel_size is {experts}, must be 1, since {architecture.name} is dense: choose 1",
                "expert_model_parallel_size",
            )

    def _check_heads(self, architecture: Architecture, seq_length: int) -> None:
        """Checks Megatron's rules for the heads that tensor parallel ranks share.

        They are in ``transformer_config.py``, ``attention.py`` and ``tensor_parallel/layers.py`` of
        ``megatron/core``, 0.16.1 and 0.19.2. With more ranks than query groups, each rank has a part of a group's
        matrices, and gathers the queries, keys and values of all ranks in each forward pass.
        """
        groups = architecture.num_query_groups
        if architecture.norms_all_heads_fused and self.tensor_model_parallel_size > 1:
            raise RuleError(
                f"tensor_model_parallel_size is {self.tensor_model_parallel_size}, must be 1 for {architecture.name}, "
                "whose norms of all heads Megatron-Bridge does not divide: choose 1",
                "tensor_model_parallel_size",
            )
        if architecture.norms_all_heads and self.tensor_model_parallel_size > groups:
            raise RuleError(
                f"tensor_model_parallel_size is {self.tensor_model_parallel_size}, must be at most {groups}, the query "
                f"groups of {architecture.name}, since memlab does not predict a norm of all heads where ranks have "
                f"the same keys: choose {groups} or fewer",
                "tensor_model_parallel_size",
            )
        rule = _heads_refuse(architecture, self.tensor_model_parallel_size)
        if rule is not None:
            choices = ", ".join(map(str, self._tensor_sizes(architecture, seq_length)))
            raise RuleError(
                f"tensor_model_parallel_size is {self.tensor_model_parallel_size}, {rule}, by a rule of Megatron-Core: "
                f"choose from {choices}",
                "tensor_model_parallel_size",
            )

    def _tensor_sizes(self, architecture: Architecture, seq_length: int) -> list[int]:
        """Returns the sizes of tensor parallelism, up to 128, that divide all that it shares."""
        most = architecture.num_query_groups if architecture.norms_all_heads else architecture.num_attention_heads
        amounts = [one.amount for one in architecture.shared_sizes if one.ranks == "tensor_model_parallel_size"]
        if self.sequence_parallel:
            amounts.append(seq_length // self.context_parallel_size)
        divides = math.gcd(architecture.vocab_size, *amounts)
        sizes = [size for size in range(1, min(most, 128) + 1) if divides % size == 0]
        return [size for size in sizes if _heads_refuse(architecture, size) is None]

    def _check_chunks(self, num_layers: int, num_microbatches: int) -> None:
        """Checks Megatron's rules (``TransformerConfig`` and ``forward_backward_pipelining_with_interleaving``)."""
        stages, chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        if self.pipeline_model_parallel_layout is not None:
            named = sum(layers_of_pipeline_chunks(self.pipeline_model_parallel_layout))
            if named != num_layers:
                raise RuleError(
                    f"{FIELD} is {shortened(self.pipeline_model_parallel_layout)} with {named} layers, must have the "
                    f"{num_layers} of the model: correct one of them",
                    *(FIELD, "num_layers"),
                )
            chunks_of_equal_size = 1
        else:
            chunks_of_equal_size = chunks
        layers = {self.layers_of_stage(stage, num_layers) for stage in range(stages)}
        uneven = [count for count in sorted(layers) if count % chunks_of_equal_size]
        if uneven:
            common = math.gcd(*layers)
            choices = [str(count) for count in range(1, common + 1) if common % count == 0]
            raise RuleError(
                f"virtual_pipeline_model_parallel_size is {chunks}, must divide the {uneven[0]} layers of a pipeline "
                f"stage: choose from {', '.join(choices)}",
                "virtual_pipeline_model_parallel_size",
            )
        if chunks > 1 and num_microbatches % stages:
            raise RuleError(
                f"num_microbatches is {num_microbatches}, must be a multiple of the number of stages, {stages}, "
                "if the schedule is "
                f"interleaved: choose from {stages}, {2 * stages}, {3 * stages} and so on",
                "num_microbatches",
            )

    def _stages_and_layers(self, num_layers: int) -> list[tuple[str, int, str, int]]:
        if self.pipeline_model_parallel_layout is not None:
            return []
        rest, stages = self._even(num_layers)
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        has_ends = first is not None or last is not None
        if has_ends and (self.pipeline_model_parallel_size == 1 or rest < stages or (not stages and rest)):
            raise RuleError(
                f"num_layers_in_first_pipeline_stage {first} and num_layers_in_last_pipeline_stage {last} leave {rest} "
                f"of {num_layers} layers to {stages} stages, must leave at least one to each stage: give other numbers",
                *_ENDS,
            )
        if has_ends and stages and rest % stages:
            given = "num_layers_in_first_pipeline_stage" if last is None else "num_layers_in_last_pipeline_stage"
            if first is not None and last is not None:
                given = "num_layers_in_first_pipeline_stage + num_layers_in_last_pipeline_stage"
            at_ends, more = num_layers - rest, rest % stages
            fewer = at_ends + more - stages
            fewest = self.pipeline_model_parallel_size - stages  # one layer for each stage at an end
            choices = f"{fewer} or {at_ends + more}" if fewer >= fewest else f"{at_ends + more}"
            other = "last" if last is None else "first"
            action = f"choose, for example, {choices}, or give the {other} stage a number too"
            if first is not None and last is not None:
                action = f"choose a sum of, for example, {choices}"
            raise RuleError(
                f"{given} is {at_ends}, which leaves {rest} of {num_layers} layers to the other {stages} stages, must "
                f"leave the same number to each of them: {action}",
                *_ENDS,
            )
        return [("pipeline_model_parallel_size", stages, "layers", rest)] if stages and not has_ends else []

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Returns the layout of a text as `str` writes it, such as ``"TP2 DP4"``, or ``"one rank"`` for a single rank.

        ``"tp2 dp4"`` is the same.

        Raises:
            ValueError: If a word is not a size of a layout, or the sizes break a rule.
        """
        sizes: dict[str, Any] = {}
        for word in text.split() if text != _ONE_RANK else ():
            match = re.fullmatch(r"([A-Z]+)(\d{1,6})", word.upper(), re.ASCII)
            if word.upper() == _WHOLE_SEQUENCES and "sequence_parallel" not in sizes:
                sizes["sequence_parallel"] = False
                continue
            name, equals, value = word.partition("=")
            if equals and name in _OF_STAGES and name not in sizes:
                sizes[name] = int(value) if value.isdecimal() else value
                continue
            if match is None or match[1] not in _SHORT or _SHORT[match[1]] in sizes:
                raise ValueError(
                    f"layout {text!r} has the word {word!r}, may have only {', '.join(_SHORT)}, each with a number, "
                    f"{_WHOLE_SEQUENCES}, and {', '.join(f'{name}=VALUE' for name in _OF_STAGES)}, each at most once: "
                    "write for example 'TP2 DP4'"
                )
            sizes[_SHORT[match[1]]] = int(match[2])
        return cls(**sizes)

    def __str__(self) -> str:
        short = {name: getattr(self, field) for name, field in _SHORT.items()} | {"ETP": self.expert_tensor_size}
        usual = {"ETP": self.tensor_model_parallel_size}
        words = [f"{name}{size}" for name, size in short.items() if size != usual.get(name, 1)]
        words[1:1] = [_WHOLE_SEQUENCES] if self.has_whole_sequences else []
        of_stages = {name: getattr(self, name) for name in _OF_STAGES if getattr(self, name) is not None}
        words += [f"{name}={re.sub('[ ,]', '', str(value))}" for name, value in of_stages.items()]
        return " ".join(words) or _ONE_RANK


def _heads_refuse(architecture: Architecture, size: int) -> str | None:
    """Returns the rule for heads that a size of tensor parallelism breaks; None if it breaks none."""
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    rows = (heads + 2 * groups) * architecture.kv_channels
    if heads % size:
        return f"must divide the {heads} attention heads of {architecture.name}"
    if groups % size and size % groups:
        return f"must be a divisor or a multiple of the {groups} query groups of {architecture.name}"
    return f"must divide the {rows} rows of query, key and value" if rows % size else None
