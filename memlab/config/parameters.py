"""How many parameters a rank has, and how many bytes training keeps for each."""

from __future__ import annotations

from typing import NamedTuple

from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState


class Parameters(NamedTuple):
    """Numbers of parameters; those of experts are spread over other ranks than the others."""

    layers: int
    """In layers, without experts."""
    vocabulary: int
    """Of the embedding, of the output layer, and of the norm before it."""
    experts: int

    @property
    def outside_experts(self) -> int:
        """All but those of experts."""
        return self.layers + self.vocabulary


def parameters_of_rank(scenario: Scenario) -> Parameters:
    """Counts the parameters of the scenario's rank."""
    model, layout = scenario.architecture, scenario.layout
    weights = model.weights_of(scenario.layers_of_rank).items()
    inside, outside = (
        sum(count * layout.elements_of(weight) for weight, count in weights if bool(weight.num_experts) is is_expert)
        for is_expert in (True, False)
    )
    has_embedding = layout.pipeline_stage == 0
    has_output = layout.pipeline_stage == layout.pipeline_model_parallel_size - 1
    is_tied = model.share_embeddings_and_output_weights and has_embedding and has_output
    matrices = has_embedding + has_output - is_tied
    vocabulary = matrices * model.vocab_size * model.hidden_size // layout.tensor_model_parallel_size
    return Parameters(outside, vocabulary + has_output * model.hidden_size, inside)


def bytes_of_gradient(scenario: Scenario) -> int:
    """Returns the bytes of a parameter's gradient in DDP's buffer."""
    return 2 if scenario.dtype == "bf16" and scenario.state.grad_reduce_in_bf16 else 4


def bytes_of_optimizer(state: TrainingState, dtype: str) -> tuple[int, int]:
    """Returns the bytes of a parameter's main parameter and of its moments together, wherever they are.

    See `TrainingState` for the types.
    """
    if not state.use_precision_aware_optimizer or state.optimizer_cpu_offload:
        return 4 if dtype == "bf16" else 0, 4 + 4
    moments = sum(4 if moment == "fp32" else 2 for moment in (state.exp_avg_dtype, state.exp_avg_sq_dtype))
    if state.fp8_format is not None and state.fp8_recipe != "delayed":
        return 4, moments
    return 2 if dtype == "bf16" or state.main_params_dtype == "fp16" else 4, moments
