"""How a job is spread over ranks: the sizes of its parallel groups, and which rank is looked at."""

from __future__ import annotations

from dataclasses import dataclass, fields

from memlab.architectures import Architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of Megatron's parallel groups; one rank alone by default.

    Raises:
        ValueError: If a size is no positive number, or the expert groups do not fit the other ranks.
    """

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices; above 1 with sequence parallel, as MoE models need it."""
    pipeline_model_parallel_size: int = 1
    """Stages of layers, one after the other (1F1B)."""
    expert_model_parallel_size: int = 1
    """Ranks that share a layer's experts, out of those of one pipeline stage."""
    data_parallel_size: int = 1
    """Copies of the model, each with its own batch; the optimizer's state is spread over them."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Fewer or more than in the stages between, which share the rest evenly; None is alike."""
    num_layers_in_last_pipeline_stage: int | None = None
    """As of the first."""
    rank: int = 0
    """The one that is looked at, of `world_size`, in Megatron's order: tensor, data, pipeline."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "rank" or (value is None and field.default is None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} is {value!r}, must be a whole number of at least 1: give another value")
        ranks_of_a_stage = self.tensor_model_parallel_size * self.data_parallel_size
        if ranks_of_a_stage % (self.expert_model_parallel_size * self.tensor_model_parallel_size):
            raise ValueError(
                f"expert_model_parallel_size is {self.expert_model_parallel_size}, must divide data_parallel_size, "
                f"{self.data_parallel_size}: experts are spread over ranks that see different tokens"
            )
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank!r}, must be from 0 to {self.world_size - 1}, of {self.world_size} ranks "
                f"({self}): choose another rank or layout"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between matrices are split along the sequence."""
        return self.tensor_model_parallel_size > 1

    def layers_of_stage(self, stage: int, num_layers: int) -> int:
        """Returns how many layers a pipeline stage has, as Megatron's ``get_num_layers_to_build`` does."""
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        if stage == 0 and first is not None:
            return first
        if stage == self.pipeline_model_parallel_size - 1 and last is not None:
            return last
        rest, stages = self._even(num_layers)
        return rest // stages

    def _even(self, num_layers: int) -> tuple[int, int]:
        """Returns the layers, and the stages, that are shared out evenly."""
        given = [self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage]
        counts = [count for count in given if count is not None]
        return num_layers - sum(counts), self.pipeline_model_parallel_size - len(counts)

    def distinct_ranks(self, *, by_expert: bool) -> tuple[int, ...]:
        """Returns one rank of every kind: those of a pipeline stage are alike, and those with the same experts.

        Args:
            by_expert: Whether experts differ in how many tokens they get.
        """
        ranks_of_a_stage = self.world_size // self.pipeline_model_parallel_size
        kinds = range(self.expert_model_parallel_size if by_expert else 1)
        # Experts are spread in Megatron's order over ranks that follow each other, behind the tensor-parallel ones.
        first = [kind * self.tensor_model_parallel_size for kind in kinds]
        return tuple(
            stage * ranks_of_a_stage + rank for stage in range(self.pipeline_model_parallel_size) for rank in first
        )

    def check(self, architecture: Architecture, num_layers: int, seq_length: int) -> None:
        """Holds the layout against what it splits.

        Raises:
            ValueError: If something does not divide.
        """
        tensor = self.tensor_model_parallel_size
        experts = architecture.num_moe_experts
        for name, size, what, amount in (
            ("tensor_model_parallel_size", tensor, "query groups", architecture.num_query_groups),
            ("tensor_model_parallel_size", tensor, "entries of the vocabulary", architecture.vocab_size),
            ("tensor_model_parallel_size", tensor, "tokens of a sequence", seq_length),
            *self._stages_and_layers(num_layers),
            ("expert_model_parallel_size", self.expert_model_parallel_size, "experts", experts or 1),
        ):
            if amount % size:
                divisors = [str(count) for count in range(1, min(amount, 64) + 1) if amount % count == 0]
                rule = f"must divide the {amount} {what} of {architecture.name}"
                if what == "experts" and not architecture.is_moe:
                    rule = f"must be 1, since {architecture.name} is dense"
                raise ValueError(f"{name} is {size}, {rule}: choose from {', '.join(divisors)}")

    def _stages_and_layers(self, num_layers: int) -> list[tuple[str, int, str, int]]:
        rest, stages = self._even(num_layers)
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        has_ends = first is not None or last is not None
        if has_ends and (self.pipeline_model_parallel_size == 1 or rest < stages or (not stages and rest)):
            raise ValueError(
                f"num_layers_in_first_pipeline_stage {first} and num_layers_in_last_pipeline_stage {last} leave {rest} "
                f"of {num_layers} layers to {stages} stages, must leave one or more each, and none to none: give others"
            )
        what = "layers" if rest == num_layers else "layers between first and last stage"
        return [("pipeline_model_parallel_size", stages, what, rest)] if stages else []

    def __str__(self) -> str:
        short = {"TP": self.tensor_model_parallel_size, "PP": self.pipeline_model_parallel_size}
        short |= {"EP": self.expert_model_parallel_size, "DP": self.data_parallel_size}
        return " ".join(f"{name}{size}" for name, size in short.items() if size > 1) or "one rank"
