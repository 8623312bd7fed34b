"""The seam between a lab and its engine: a second engine, torch's own `fully_shard` over a tiny model, steps under the same lab, meter and transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from memlab import MemorySettings, TrainingState
from memlab.backends import find_backend
from memlab.config.architectures import find_architecture
from memlab.config.scenario import Scenario
from memlab.engines.protocol import ALL_MICROBATCHES, Engine, HeldTensor, Microbatches, Place
from memlab.lab.one_process import OneProcess
from memlab.lab.request import StepRequest
from memlab.meter.labels import Labels, on_host
from memlab.meter.process_meter import program_meter

# DTensor finds the shapes of results with fake tensors, and the meter asks each result whether it has memory.
pytestmark = [pytest.mark.versions, pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")]
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


class Layer(torch.nn.Module):
    """A residual layer with the two matrices of an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width, bias=False),
            torch.nn.Linear(4 * width, width, bias=False),
        )
        self.is_recomputed = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, hidden, use_reentrant=False) if self.is_recomputed else self.run(hidden)  # type: ignore[no-any-return]

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.silu(self.up(hidden)))  # type: ignore[no-any-return]


def whole(tensor: Any) -> torch.Tensor:
    """Returns all of a shard's storage: the gradients of a layer are views of what its reduce-scatter has written."""
    local = tensor.to_local().detach()
    return torch.as_strided(local, (local.untyped_storage().nbytes() // local.element_size(),), (1,), 0)


class ShardedGroups:
    """The rank's shards: FSDP2 keeps no main parameters, and no gradient from `zero_grad` to backward."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def parameters(self) -> list[torch.Tensor]:
        return [whole(each) for each in self.model.parameters()]

    def gradients(self) -> list[torch.Tensor]:
        return [whole(each.grad) for each in self.model.parameters() if each.grad is not None]

    def optimizer_state(self) -> list[torch.Tensor]:
        return [whole(state[name]) for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]

    def drop_copied_gradients(self) -> int:
        return 0

    def gather(self) -> None:
        """Does nothing: each rank updates all of its own shard."""


class FullySharded:
    """An engine without any of Megatron's code: what FSDP2 answers to each question of a lab."""

    spares_shared = True
    offloaded_bytes: Mapping[str, int] = {}
    residency_faults: Mapping[str, Any] = {}

    def __init__(self, scenario: Scenario, place: Place) -> None:
        self.scenario, self.place = scenario, place
        self.model: torch.nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check(self, scenario: Scenario, settings: MemorySettings) -> None:
        if not scenario.state.use_distributed_optimizer:
            raise ValueError("use_distributed_optimizer is False, must be True: FSDP2 shards everything")

    def build(self) -> None:
        if not torch.distributed.is_initialized():
            self.place.join(self.scenario.layout)
        torch.manual_seed(self.scenario.seed)
        sizes = self.scenario.architecture
        stack = torch.nn.Sequential(
            torch.nn.Embedding(sizes.vocab_size, sizes.hidden_size),
            *(Layer(sizes.hidden_size) for _ in range(self.scenario.num_layers)),
            torch.nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False),
        )
        stack.cuda()
        with on_host():  # the numbers of the ranks
            mesh = init_device_mesh("cpu", (self.scenario.layout.data_parallel_size,))
        for each in (*stack[1:-1], stack):
            fully_shard(each, mesh=mesh)
        self.model = stack
        self.build_optimizer()

    def release_optimizer(self) -> None:
        self.optimizer = None

    def build_optimizer(self) -> None:
        assert self.model is not None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, foreach=False)

    def remember(self) -> None:
        return None

    def free(self) -> None:
        self.model = self.optimizer = None

    drop = free

    def release(self) -> None:
        self.free()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def holders(self) -> Iterator[tuple[str, Callable[[], object]]]:
        return iter(())

    def release_recipe(self, held: str, *, clears: bool) -> Iterator[str]:
        self.model = None
        yield "recipe.model_parts = None"
        self.optimizer = None
        yield "recipe.optimizer = None"

    def apply(self, settings: MemorySettings) -> None:
        for layer in self.layers:
            layer.is_recomputed = settings.recompute_granularity == "full"  # type: ignore[assignment]

    def set_state(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def train_step(
        self,
        labels: Labels,
        load_for_update: Callable[[], None] = lambda: None,
        microbatches: Microbatches = ALL_MICROBATCHES,
        update: Callable[[], None] | None = None,
    ) -> float | None:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        for _ in range(self.scenario.num_microbatches):
            labels.enter_phase("forward")
            loss = self._loss()
            labels.enter_phase("backward")
            loss.backward()
        load_for_update()
        labels.enter_phase("optimizer")
        self.optimizer.step()
        return loss.item()

    def forward_only_step(
        self, labels: Labels, microbatches: Microbatches = ALL_MICROBATCHES, *, suspend_offload: bool
    ) -> float | None:
        labels.enter_phase("forward")
        with torch.no_grad():
            return self._loss().item()

    def _loss(self) -> torch.Tensor:
        assert self.model is not None
        shape = (self.scenario.micro_batch_size, self.scenario.seq_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
        return torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())

    def during_step(
        self, on_host: Callable[[torch.Tensor], object] = lambda tensor: None
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def without_effect(self) -> dict[str, str]:
        return {}

    def recover(self, error: BaseException) -> None:
        """Does nothing: the errors of these tests come before a step has begun."""

    @property
    def layers(self) -> list[torch.nn.Module]:
        return list(self.model)[1:-1]  # type: ignore[call-overload,no-any-return]

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        yield from ((f"decoder.layers.{number}", layer) for number, layer in enumerate(self.layers))

    working_modules = named_modules

    def groups(self) -> ShardedGroups:
        assert self.model is not None and self.optimizer is not None
        return ShardedGroups(self.model, self.optimizer)

    def holdings(self) -> Iterator[HeldTensor]:
        assert self.model is not None and self.optimizer is not None
        for parameter in self.model.parameters():
            yield HeldTensor("parameters", "shards", parameter.to_local().detach())
            if parameter.grad is not None:
                yield HeldTensor("gradients", "the shards' .grad", whole(parameter.grad))
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if value.dim():
                    yield HeldTensor("optimizer state", name, value.to_local())

    def written_by_a_step(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        yield from (("parameters", "a shard", each) for each in self.groups().parameters())

    def workspace(self) -> Iterator[torch.Tensor]:
        assert self.optimizer is not None
        yield from (state["step"] for state in self.optimizer.state.values())

    uncollected_copies = workspace

    def saved_for_backward(self) -> Any:
        raise NotImplementedError

    def audit_offload(self, *args: Any) -> Any:
        raise NotImplementedError

    def repair(self) -> None:
        """Does nothing: there are no faults to repair."""


@pytest.fixture
def session() -> Iterator[OneProcess]:
    scenario = Scenario(architecture=find_architecture("phi-4-tiny"), num_layers=3, seq_length=256, dtype="fp32")
    # The meter of watched programs: of a DTensor, which has a storage without memory, it counts the shard.
    backend = replace(find_backend("cpu"), meter=lambda labels: program_meter(labels)[0])
    one = OneProcess(scenario, backend, engine=FullySharded)
    one.build()
    yield one
    one.close()


def test_another_engine_steps_under_the_same_lab(session: OneProcess) -> None:
    engine: Engine = session.model.engine
    record = session.take(StepRequest())
    num_parameters = sum(each.numel() for each in engine.groups().parameters())
    assert record.status == "ok" and record.is_steady
    kept = {name: record.peak_by_category[name] for name in ("parameters", "optimizer state")}
    assert kept == {"parameters": 4 * num_parameters, "optimizer state": 8 * num_parameters}
    assert record.residual_bytes == 0
    recomputed = session.take(StepRequest(settings=FULL))
    assert recomputed.loss == record.loss
    assert recomputed.peak_allocated_bytes < record.peak_allocated_bytes, "settings reach it, and its bytes are seen"
    assert record.peak_phase in ("forward", "backward", "optimizer")


def test_what_another_engine_shards_is_transferred_and_audited(session: OneProcess) -> None:
    before = session.take(StepRequest())
    parameters = sum(each.numel() for each in session.model.engine.groups().parameters())
    moved = session.transfer("offload", ("parameters", "optimizer state"))
    assert moved.transferred_bytes == {"parameters": 4 * parameters, "optimizer state": 8 * parameters}
    assert not session.run_exclusive(session.model.transfers.audit).complaints
    after = session.take(StepRequest())
    assert (after.loss, after.peak_allocated_bytes) == (before.loss, before.peak_allocated_bytes)
    assert not session.run_exclusive(session.model.transfers.audit).complaints
    with pytest.raises(ValueError, match="FSDP2 shards everything"):
        session.set_state(TrainingState(use_distributed_optimizer=False), None)
    session.set_state(replace(TrainingState(), grad_reduce_in_bf16=True), None)
    assert session.state_changes[-1].rebuilt == "model"
    assert session.take(StepRequest()).status == "ok"
