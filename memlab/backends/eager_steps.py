"""What live backends do not do: capture CUDA graphs. memlab looks at each operation of a measured step."""

from __future__ import annotations

from memlab.config.training_state import TrainingState


def require_eager_steps(state: TrainingState) -> None:
    """Checks that a live backend can take the steps of a training state.

    Raises:
        ValueError: If they are captured in a CUDA graph.
    """
    if state.cuda_graph_impl != "none":
        raise ValueError(
            f"cuda_graph_impl is {state.cuda_graph_impl!r}, but memlab measures eager steps only: choose 'none', or "
            "predict the step (memlab predict, backend 'simulated')"
        )
