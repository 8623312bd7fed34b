"""Programs in a watched block: each works as it does without a meter, and its bytes are those of its storages.

The bytes are counted without memlab: over the storages of all tensors that Python's garbage collector knows.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _len_torch_dispatch_stack, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

import memlab
from memlab import MemorySettings
from memlab.meter.labels import Labels, require_free
from memlab.meter.process_meter import ProgramTensors, program_meter
from memlab.vocabulary import PHASES

WIDTH, BATCH = 32, 16


def held_bytes() -> int:
    """Returns the bytes of all storages on the CPU; of a tensor that wraps others, those of the others.

    The ranks' numbers of a `DeviceMesh` do not count. Torch keeps the meshes that tests of other files have made.
    """
    gc.collect()
    found: dict[int, int] = {}
    objects = gc.get_objects()
    meshes = [each for each in objects if type(each) is torch.distributed.device_mesh.DeviceMesh]
    of_meshes = {id(value) for mesh in meshes for value in vars(mesh).values()}
    waiting = [each for each in objects if issubclass(type(each), torch.Tensor) and id(each) not in of_meshes]
    while waiting:
        tensor = waiting.pop()
        if hasattr(tensor, "__tensor_flatten__"):
            continue  # the collector knows its parts
        if tensor.layout is torch.sparse_coo:
            waiting += [tensor._indices(), tensor._values()]
        elif (storage := tensor.untyped_storage()).device.type == "cpu":  # a fake tensor's is on meta
            with suppress(RuntimeError):  # of a wrapper
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return sum(found.values())


def mlp(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, **options), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


@dataclass(slots=True)
class Program:
    """A model with what trains it, and one step of it, which returns what it computes."""

    model: nn.Module
    step: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    kept: Any = None


def training(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], kind: Any = torch.optim.AdamW) -> Program:
    optimizer = kind(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    return Program(model, step, optimizer)


def x() -> torch.Tensor:
    return torch.ones(BATCH, WIDTH)


def plain() -> Program:
    return training(mlp(), lambda model: model(x()).square().mean())


def momentum() -> Program:
    return training(
        mlp(), lambda model: model(x()).square().mean(), lambda parameters, lr: torch.optim.SGD(parameters, lr, 0.9)
    )


def lbfgs() -> Program:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x()).square().mean()
        loss.backward()
        return loss

    return Program(model, lambda: optimizer.step(closure).detach().clone(), optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(50, WIDTH), mlp(), nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def tied() -> Program:
    tokens = torch.arange(40).view(4, 10)
    return training(Tied(), lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))


def attention() -> Program:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
    return training(nn.TransformerEncoder(layer, 2), lambda model: model(x()[None]).square().mean())


def convolution() -> Program:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return training(model, lambda model: model(torch.ones(2, 3, 8, 8)).square().mean())


def recurrent() -> Program:
    return training(nn.LSTM(WIDTH, WIDTH, 2), lambda model: model(x()[None])[0].square().mean())


def sparse() -> Program:
    model = nn.EmbeddingBag(100, WIDTH, sparse=True)
    tokens = torch.arange(20).view(4, 5)
    return training(
        model, lambda model: model(tokens).sum(), lambda parameters, lr: torch.optim.SparseAdam(list(parameters), lr)
    )


def mixed_precision() -> Program:
    def loss_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x()).float().square().mean()

    return training(mlp(), loss_of)


def checkpointed(reentrant: bool) -> Program:
    model = mlp()
    return training(
        model, lambda model: checkpoint(model, x().requires_grad_(), use_reentrant=reentrant).square().mean()
    )


def checkpointed_segments() -> Program:
    model = nn.Sequential(*(mlp() for _ in range(4)))
    return training(
        model, lambda model: checkpoint_sequential(model, 2, x().requires_grad_(), use_reentrant=False).square().mean()
    )


class Wrapper(torch.Tensor):
    """Has a storage without memory, as large as its part's, and does not name its part."""

    @staticmethod
    def __new__(cls: Any, part: torch.Tensor) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype, device=part.device)  # type: ignore[attr-defined]
        wrapper.part = part
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda wrapper: wrapper.part, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, func(*args, **kwargs))


def wrapped() -> Program:
    model = mlp()
    model[0].weight = nn.Parameter(Wrapper(model[0].weight.detach()))
    kept: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        kept.append(model(x()).sum())
        return kept[-1].part.detach().clone()  # type: ignore[attr-defined]

    return Program(model, step, kept=kept)


def jagged() -> Program:
    rows = torch.nested.nested_tensor([torch.ones(3, WIDTH), torch.ones(5, WIDTH)], layout=torch.jagged)
    return training(mlp(), lambda model: sum(part.sum() for part in model(rows).unbind()))


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.square = value * value
        return ctx.square * value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 3 * ctx.square * gradient


def own_function() -> Program:
    return training(mlp(), lambda model: Cubed.apply(model(x())).mean())


def parametrized() -> Program:
    model = mlp()
    parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    return training(model, lambda model: model(x()).square().mean())


def weight_norm() -> Program:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return training(model, lambda model: model(x()).square().mean())


def functional() -> Program:
    model = mlp()
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}

    def loss_of(weights: dict[str, torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, value).square().mean()

    def step() -> torch.Tensor:
        gradients = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, x())
        for name, gradient in gradients.items():
            weights[name] = weights[name] - 0.01 * gradient.mean(0)
        return weights["0.weight"].sum()

    return Program(model, step, kept=weights)


def ensemble() -> Program:
    models = nn.ModuleList(mlp() for _ in range(3))
    parameters, buffers = torch.func.stack_module_state(list(models))

    def call(parameters: Any, buffers: Any, value: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), value)

    return Program(models, lambda: torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x()).sum())


def hooked() -> Program:
    model = mlp()
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.detach().sum()) or output + 1)
    model[2].register_full_backward_hook(lambda module, before, after: None)
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    program = training(model, lambda model: model(x()).square().mean())
    program.kept = seen
    return program


def averaged() -> Program:
    program = plain()
    average = torch.optim.swa_utils.AveragedModel(program.model)

    def step() -> torch.Tensor:
        loss = program.step()
        average.update_parameters(program.model)
        fresh = torch.optim.swa_utils.AveragedModel(program.model)
        return loss + fresh(x()).sum()

    return Program(program.model, step, program.optimizer, average)


def copied() -> Program:
    program = plain()

    def step() -> torch.Tensor:
        loss = program.step()
        program.kept = copy.deepcopy(program.model), pickle.loads(pickle.dumps(program.model))  # noqa: S301
        return loss + program.kept[0](x()).sum() + program.kept[1](x()).sum()

    return Program(program.model, step, program.optimizer, program)


def saved() -> Program:
    program = plain()

    def step() -> torch.Tensor:
        loss = program.step()
        file = io.BytesIO()
        torch.save((program.model, program.optimizer), file)
        file.seek(0)
        program.kept = torch.load(file, weights_only=False)
        return loss + program.kept[0](x()).sum()

    return Program(program.model, step, program.optimizer, program)


def compiled(backend: str) -> Program:
    model = torch.compile(mlp(), backend=backend, fullgraph=True)
    return training(model, lambda model: model(x()).square().mean())


def scripted() -> Program:
    model = mlp()

    def step() -> torch.Tensor:
        return torch.jit.script(model)(x()).sum() + torch.jit.trace(model, x())(x()).sum()

    return Program(model, step)


def threaded() -> Program:
    program = plain()
    model = program.model
    found: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        loss = program.step()
        thread = threading.Thread(target=lambda: found.append(model(x()).detach()))
        thread.start()
        thread.join()
        return loss + found[-1].sum()

    return Program(model, step, program.optimizer, found)


def asynchronous() -> Program:
    model = mlp()

    async def one(scale: float) -> torch.Tensor:
        half = model(x() * scale)
        await asyncio.sleep(0)
        half.sum().backward()
        return half.detach().sum()

    async def all_of_them() -> torch.Tensor:
        return sum(await asyncio.gather(*(one(scale) for scale in (1.0, 2.0, 3.0))))

    def step() -> torch.Tensor:
        # Playwright may keep an event loop running on this thread, after tests in a browser; a thread has one at most.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, all_of_them()).result()

    return Program(model, step)


def deep() -> Program:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(60):
        model = nn.Sequential(model)
    return training(model, lambda model: model(torch.ones(2, 4)).square().mean())


def changed_in_place() -> Program:
    model = mlp()
    kept: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        model[0].weight.data = model[0].weight.data.clone()
        model[1] = nn.ReLU() if len(kept) % 2 else nn.GELU()
        kept.append(torch.from_numpy(model[0].weight.detach().numpy().copy()))
        del kept[:-2]
        return model(x()).sum().detach()

    return Program(model, step, kept=kept)


def higher_order() -> Program:
    def loss_of(model: nn.Module) -> torch.Tensor:
        value = x().requires_grad_()
        [gradient] = torch.autograd.grad(model(value).sum(), value, create_graph=True)
        return gradient.square().mean()

    return training(mlp(), loss_of)


PROGRAMS: dict[str, Callable[[], Program]] = {
    each.__name__: each
    for each in (
        *(plain, momentum, lbfgs, tied, attention, convolution, recurrent, sparse, mixed_precision),
        *(checkpointed_segments, own_function, parametrized, weight_norm, functional, ensemble, hooked, averaged),
        *(wrapped, jagged, copied, saved, scripted, threaded, asynchronous, deep, changed_in_place, higher_order),
    )
}
PROGRAMS |= {
    "reentrant checkpoint": lambda: checkpointed(True),
    "checkpoint": lambda: checkpointed(False),
    "compiled eagerly": lambda: compiled("eager"),
    "compiled by aot_eager": lambda: compiled("aot_eager"),
}


def results_of(make: Callable[[], Program], *, watched: bool) -> list[float]:
    torch.manual_seed(0)
    program = make()
    results = []
    for _ in range(3):
        if not watched:
            results.append(program.step().item())
            continue
        optimizers = [] if program.optimizer is None else [program.optimizer]
        before = held_bytes()
        with memlab.watch(program.model, *optimizers) as run:
            result = program.step()
        after = held_bytes()
        results.append(result.item())
        del result
        assert run.timeline is not None
        assert run.static_bytes == before
        assert run.timeline.bytes_at(len(run.timeline) - 1) == after
        assert run.peak_allocated_bytes >= max(before, after)
    return results


FEW = ("plain", "tied", "threaded", "asynchronous", "copied", "saved")
"""Programs of every run of the tests; the others are slow."""


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_a_program_works_as_without_a_meter_and_its_bytes_are_those_of_its_storages(name: str) -> None:
    torch.compiler.reset()
    assert results_of(PROGRAMS[name], watched=True) == results_of(PROGRAMS[name], watched=False)
    require_free(Labels(), whole_process=True)
    assert not _len_torch_dispatch_stack()


@pytest.fixture(autouse=True)
def _no_other_programs() -> Iterator[None]:
    gc.collect()  # tests of other files, which a process may have run before, leave cycles too
    yield
    gc.collect()


def test_a_generator_that_ends_on_another_thread_ends_the_meter() -> None:
    model = mlp()

    def steps() -> Iterator[Any]:
        with memlab.watch(model) as run:
            yield run

    for end in (lambda generator: generator.close(), lambda generator: next(generator, None)):
        generator = steps()
        run = next(generator)
        torch.empty(1000)
        failures: list[BaseException] = []
        thread = threading.Thread(target=_noting(failures, lambda: end(generator)))  # noqa: B023  # joined below
        thread.start()
        thread.join()
        assert not failures
        assert not _len_torch_dispatch_stack()
        num_events = len(run.timeline)
        torch.empty(1000)
        assert len(run.timeline) == num_events and run.peak_allocated_bytes >= run.static_bytes + 4000


def _noting(failures: list[BaseException], do: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            failures.append(error)

    return run


def test_a_mode_that_the_program_enters_in_the_block_may_be_left_after_it() -> None:
    def steps() -> Iterator[Any]:
        with memlab.watch(mlp()) as run:
            yield run

    # torch has one such flag for all threads, which modes of two threads that overlapped before have left as it is.
    was_in_mode = is_in_torch_dispatch_mode()
    generator = steps()
    next(generator)
    with FlopCounterMode(display=False) as flops:
        generator.close()
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert flops.get_total_flops() == 2 * 4**3
    assert not _len_torch_dispatch_stack() and is_in_torch_dispatch_mode() == was_in_mode


def test_one_block_at_a_time_on_any_thread() -> None:
    model = mlp()
    failures: list[BaseException] = []

    def watch_too() -> None:
        with memlab.watch(model):
            pass

    with memlab.watch(model):
        thread = threading.Thread(target=_noting(failures, watch_too))
        thread.start()
        thread.join()
    assert [str(each) for each in failures] == [
        "watch meters one block at a time, and another block is watched in this process: leave that block first"
    ]
    watch_too()


@pytest.mark.parametrize("backend", ["cpu", "simulated"])
def test_a_watched_block_and_a_step_of_a_lab_do_not_see_each_other(backend: str) -> None:
    model = mlp()
    with memlab.Lab("phi-4-tiny", num_layers=1, seq_length=64, backend=backend) as lab:
        alone = lab.step()

        def watched(before: Callable[[], Any], after: Callable[[Any], Any]) -> Any:
            with memlab.watch(model) as run:
                value = before()
                result = model(x()).sum().detach()
            assert run.timeline.breakdown(len(run.timeline) - 1).get("activations", 0) == result.nbytes
            return after(value)

        records = [
            watched(lab.submit, lambda future: future.result()),  # the block ends first
            watched(lab.step, lambda record: record),
            watched(lambda: lab.submit(MemorySettings(offload_modules=("core_attn",))).result(), lambda _: lab.step()),
        ]
        running = lab.submit(MemorySettings())
        watched(lambda: None, lambda _: None)  # the block begins in the step
        records.append(running.result())
    for record in (records[0], records[1], records[3]):
        assert record.peak_by_category == alone.peak_by_category and record.is_steady
        assert (record.static_bytes, record.host_bytes) == (alone.static_bytes, alone.host_bytes)
    require_free(Labels(), whole_process=True)
    assert "resize_" not in vars(torch.UntypedStorage)


def test_what_another_thread_frees_while_a_block_begins_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a step of a lab in that thread has a higher peak, which nobody would explain."""
    tensors = [torch.ones(3) for _ in range(100)]
    references = [weakref.ref(each) for each in tensors]
    num_alive = []

    def free(_: ProgramTensors, found: object) -> None:
        tensors.clear()
        num_alive.append(sum(each() is not None and each() is not found for each in references))

    monkeypatch.setattr(ProgramTensors, "after_operation", free)
    _, unseen = program_meter(Labels())
    unseen.count_existing()
    assert len(num_alive) > 1
    assert set(num_alive) == {0}


def test_the_program_may_free_its_model_in_the_block() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    parameter_bytes = sum(each.nbytes for each in model.parameters())
    with memlab.watch(model, optimizer) as run:
        model(x()).sum().backward()
        optimizer.step()
        gone = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert gone() is None
    assert run.timeline is not None
    assert run.static_bytes - run.timeline.bytes_at(len(run.timeline) - 1) >= parameter_bytes


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_error_leaves_nothing_behind(error: type[BaseException]) -> None:
    model = mlp()
    originals = torch.nn.Module._call_impl, torch.serialization._save, dict(vars(model[0]))

    def fail(*_: object) -> None:
        raise error

    handle = model[2].register_forward_pre_hook(fail)
    with pytest.raises(error), memlab.watch(model) as run:
        model(x())
    handle.remove()
    assert run.status == "interrupted" and run.message.startswith(error.__name__)
    assert (torch.nn.Module._call_impl, torch.serialization._save, dict(vars(model[0]))) == originals
    assert not _len_torch_dispatch_stack()


def test_a_checkpoint_save_is_a_phase(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as distributed_checkpoint

    from memlab.views.figures.resample import phase_spans

    program = plain()
    state = {"model": program.model.state_dict()}

    def write_async() -> None:
        distributed_checkpoint.async_save(state, checkpoint_id=tmp_path / "async", no_dist=True).result()

    saves: dict[str, Callable[[], object]] = {
        "torch.save": lambda: torch.save(program.model, tmp_path / "model.pt"),
        "legacy": lambda: torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False),
        "distributed": lambda: distributed_checkpoint.save(state, checkpoint_id=tmp_path / "d", no_dist=True),
        "async": write_async,
    }
    for name, save in saves.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            with memlab.watch(program.model, program.optimizer) as run:
                program.step()
                save()
                program.step()
        assert run.timeline is not None
        codes = run.timeline.phase[run.timeline.num_opening_events :]
        changes = [PHASES[code] for at, code in enumerate(codes) if not at or codes[at - 1] != code]
        assert [phase for phase in changes if phase != "idle"] == [
            *("forward", "backward", "optimizer", "save", "forward", "backward", "optimizer")
        ], name
        spans = {span.phase for span in phase_spans(run.timeline, narrowest=0.0)}
        assert "save" in spans


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def known_bytes(*tensors: Any) -> int:
    """Returns the bytes of the tensors' storages, of a sharded one those of the local shard."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_the_buckets_of_ddp_are_named_also_in_the_first_block(views: bool) -> None:
    parallel = nn.parallel.DistributedDataParallel(mlp(), gradient_as_bucket_view=views)
    parameter_bytes = known_bytes(*parallel.parameters())
    program = training(parallel, lambda model: model(x()).square().mean())
    others = held_bytes() - parameter_bytes  # buckets are not among them: only C++ has them
    for number in range(3):
        state_bytes = known_bytes(*(each for state in program.optimizer.state.values() for each in state.values()))
        with memlab.watch(parallel, program.optimizer) as run:
            program.step()
        assert run.static_bytes == others + 2 * parameter_bytes + state_bytes, number
        assert run.residual_bytes == 0
        assert run.peak_by_module["DistributedDataParallel's buckets"] == parameter_bytes
        category = "gradients" if views else "workspace"
        assert run.peak_by_category[category] == parameter_bytes


@pytest.mark.usefixtures("one_rank")
def test_sharded_parameters_are_counted_once_by_their_local_shards() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    for shard in (fully_shard, lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"))):
        model = mlp()
        model = shard(model) or model
        program = training(model, lambda model: model(x()).square().mean())
        program.step()
        for number in range(2):
            state = [each for kept in program.optimizer.state.values() for each in kept.values()]
            gc.collect()
            with memlab.watch(model, program.optimizer) as run:
                program.step()
            assert run.timeline is not None
            opening = run.timeline.breakdown(run.timeline.num_opening_events - 1)
            assert opening["parameters"] == known_bytes(*model.parameters()), number
            assert opening["optimizer state"] == known_bytes(*state)
            assert run.residual_bytes == 0
            last = run.timeline.breakdown(len(run.timeline) - 1)
            assert last == opening


_RANK = """
import os, sys, torch, memlab
from tests.unit.test_watch_programs import known_bytes, mlp, training, x
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
store = torch.distributed.FileStore(sys.argv[2], 2)
torch.distributed.init_process_group("gloo", rank=int(sys.argv[1]), world_size=2, store=store)
results = []
for wrap in (fully_shard, lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
             torch.nn.parallel.DistributedDataParallel):
    losses = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        model = mlp()
        model = wrap(model) or model
        program = training(model, lambda model: model(x()).square().mean())
        program.step()
        if not is_watched:
            losses.append(program.step().item())
            continue
        with memlab.watch(model, program.optimizer) as run:
            losses.append(program.step().item())
        opening = run.timeline.breakdown(run.timeline.num_opening_events - 1)
        held = [value for state in program.optimizer.state.values() for value in state.values()]
        assert opening["parameters"] == known_bytes(*model.parameters()), opening
        assert opening["optimizer state"] == known_bytes(*held), opening
        assert run.residual_bytes == 0
        names = {run.timeline.modules[code] for code in run.timeline.module}
        assert names & {"FSDP's unsharded parameters", "DistributedDataParallel's buckets"}, names
    assert losses[0] == losses[1]
    results.append(opening["parameters"])
print(results)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_count_their_own_shards(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    of_all = sum(each.nbytes for each in mlp().parameters())
    # 64 x 32 + 64 + 32 x 64 + 32 parameters are split evenly.
    assert printed == [f"{[of_all // 2, of_all // 2, of_all]}\n"] * 2


@pytest.mark.parametrize(("name", "head"), [("", "Sequential, "), ("mine", "mine: Sequential, ")])
def test_a_block_of_a_model_s_own_name_says_the_class_once(name: str, head: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with memlab.watch(model, name=name) as run:
        model(torch.ones(1, 4))
    assert str(run).startswith(head)
