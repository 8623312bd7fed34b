"""`memlab.watch`: meters any training step of PyTorch, with the meters and labels of a lab."""

from __future__ import annotations

import platform
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memlab._version import __version__
from memlab.cpu_info import processor_name
from memlab.meter.cuda.meter import AllocatorMeter
from memlab.meter.labels import Labels, labelled_by
from memlab.meter.observers import tensors_with_memory
from memlab.meter.process_meter import ProgramTensors, program_meter
from memlab.meter.protocol import Meter
from memlab.watching.framework_buffers import framework_buffers, rank_maps
from memlab.watching.phases import Phases
from memlab.watching.run import Run


@contextmanager
def watch(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, name: str = "") -> Iterator[Run]:
    """Meters the block: any code that trains or evaluates a model of PyTorch, on the CPU or on one GPU.

    Example:
        After the block, ``run`` is a table and a timeline; `memlab.compare` draws several runs on one axis::

            with memlab.watch(model, optimizer) as run:
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            run  # a table: the peak by category, phase and module
            run.show()  # the timeline

    Every allocation and every free gets its category, phase and module. What is allocated when the block begins is
    counted too: parameters and buffers, gradients, and the state of the optimizers. Other tensors are ``unlabelled``.
    The program works as it does without the meter: nothing is put on the model or its parameters, so copies and
    checkpoints of them are those of the program, and the block keeps neither the model nor its optimizers alive. It may
    be a generator that ends on another thread: then the meter ends there too.

    On a GPU the bytes are those of ``torch.cuda.memory_allocated()``; the allocator's history, and
    ``torch.cuda.max_memory_allocated()``, start over with the block. On the CPU the bytes are those of the tensors that
    this thread makes and of those that Python's garbage collector finds at the block's start. Tensors that another
    thread makes, or that no operation returns (``torch.from_numpy``), are counted when an operation of this thread uses
    them, at the latest when the block ends. Memory that an operation uses inside itself is not seen, nor are the
    buffers inside a function that torch's inductor has compiled. If backward runs in the block and forward ran before
    it, what forward's operations saved of their own, such as the log-softmax inside ``cross_entropy``, is counted only
    when backward uses it.

    Of a tensor that wraps others the parts are counted: of a ``DTensor`` the local shard. DDP's buckets and FSDP's
    unsharded parameters are ``workspace``, under their own names in the place of a module's; where DDP's gradients are
    views of its buckets, these are ``gradients``. The ranks' numbers that a ``DeviceMesh`` keeps on the CPU are left
    out.

    In backward, a module whose forward runs is recomputed. What a checkpoint recomputes outside all modules of the
    model is counted as temporary. ``torch.save`` is a phase of its own, and so is a save of
    ``torch.distributed.checkpoint`` if that was imported before the block.

    Args:
        model: Its parameters and buffers are on one device, the CPU or the current CUDA device.
        *optimizers: Those whose state exists when the block begins. Others are seen when they step.
        name: What the block is called in tables and figures; if empty, the name of the model's class.

    Yields:
        The run, complete when the block has ended. An error in the block ends it and is raised; the run then
        contains what was seen until the error, and its status says how it ended.

    Raises:
        ValueError: If the model is on several devices or on any other device, if an argument is not a model or an
            optimizer, or if another block is watched in this process; on a GPU also if a lab works in it.
    """
    device = _device_of(model)
    _check_optimizers(optimizers)
    run = Run(
        name=name or type(model).__name__,
        model=f"{type(model).__name__}, {_num_parameters(model):,} parameters",
        backend=device.type,
        hardware={"GPU": torch.cuda.get_device_name()} if device.type == "cuda" else {"CPU": processor_name()},
        versions={"memlab": __version__, "python": platform.python_version(), "torch": torch.__version__},
    )
    labels = Labels()
    training_state = _TrainingState(model, optimizers)
    modules = [(name or type(model).__name__, module) for name, module in model.named_modules()]
    meter: Meter
    unseen: ProgramTensors | None = None  # of a GPU, the allocator's history has all
    is_on_gpu = device.type == "cuda"
    with ExitStack() as stack:
        stack.enter_context(_only_block())
        stack.enter_context(labelled_by(labels, whole_process=is_on_gpu))
        if is_on_gpu:
            meter = on_gpu = AllocatorMeter(labels)
            stack.callback(on_gpu.stop_recording)
        else:
            meter, unseen = program_meter(labels, without=rank_maps())
            unseen.count_existing()
        phases = Phases(
            labels,
            any_thread=is_on_gpu,
            after_backward=lambda: meter.categorise(training_state.gradients()),
            before_update=lambda optimizer: meter.categorise(training_state.with_optimizer(optimizer).gradients()),
            after_update=lambda optimizer: meter.categorise(training_state.categories()),
            around_save=meter.mark,
        )
        stack.enter_context(phases.following(modules))
        del model, optimizers, modules  # the program may free them in the block
        stack.enter_context(meter.watching())
        _categorise_framework_buffers(meter, unseen)
        meter.start(training_state.categories(), others="unlabelled")
        started = time.perf_counter()
        try:
            yield run
        except BaseException as error:
            run.status = "out_of_memory" if isinstance(error, torch.OutOfMemoryError) else "interrupted"
            run.message = " ".join(f"{type(error).__name__}: {error}".split())
            raise
        finally:
            if is_on_gpu:
                torch.cuda.synchronize()
            run.step_seconds = time.perf_counter() - started
            _categorise_framework_buffers(meter, unseen)
            meter.categorise(training_state.categories())
            if unseen is not None:
                unseen.count_unseen()
            run.timeline = meter.finish()


_in_block = threading.Lock()


@contextmanager
def _only_block() -> Iterator[None]:
    """Makes this the one watched block of the process.

    Raises:
        ValueError: If there is another.
    """
    if not _in_block.acquire(blocking=False):
        raise ValueError(
            "watch meters one block at a time, and another block is watched in this process: leave that block first"
        )
    try:
        yield
    finally:
        _in_block.release()  # perhaps on another thread


def _categorise_framework_buffers(meter: Meter, unseen: ProgramTensors | None) -> None:
    for buffers in framework_buffers():
        if unseen is not None:
            unseen.after_operation(buffers.tensors)  # C++ may hold them alone
        meter.categorise({buffers.category: buffers.tensors}, module=buffers.owner)


class _TrainingState:
    """What training keeps from step to step, by category: of a model and of optimizers that the program may free."""

    def __init__(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._model = weakref.ref(model)
        self._optimizers = {id(optimizer): weakref.ref(optimizer) for optimizer in optimizers}

    def with_optimizer(self, optimizer: torch.optim.Optimizer) -> _TrainingState:
        """Adds an optimizer that was not known."""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        return self

    def _live_optimizers(self) -> list[torch.optim.Optimizer]:
        found = (reference() for reference in self._optimizers.values())
        return [optimizer for optimizer in found if optimizer is not None]

    def parameters(self) -> dict[int, torch.Tensor]:
        """Returns the parameters of the model and of the optimizers, by their identity."""
        model = self._model()
        groups = (group for optimizer in self._live_optimizers() for group in optimizer.param_groups)
        of_optimizers = (parameter for group in groups for parameter in group["params"])
        parameters = [*(() if model is None else model.parameters()), *of_optimizers]
        return {id(each): each for each in parameters if not is_lazy(each)}

    def gradients(self) -> dict[str, list[torch.Tensor]]:
        """Returns the gradients that exist now."""
        gradients = [parameter.grad for parameter in self.parameters().values() if parameter.grad is not None]
        return {"gradients": [part for gradient in gradients for part in tensors_with_memory(gradient)]}

    def of_optimizers(self) -> dict[str, list[torch.Tensor]]:
        """Returns the optimizers' state, perhaps with other tensors of a parameter's memory, such as its ``data``."""
        state = [each for optimizer in self._live_optimizers() for each in _tensors_in_state(optimizer.state)]
        own = self.parameters()
        return {
            "optimizer state": [part for each in state if id(each) not in own for part in tensors_with_memory(each)]
        }

    def categories(self) -> dict[str, list[torch.Tensor]]:
        """Returns all of it, the optimizers' state first: what is a parameter's or a gradient's too is not its own."""
        model = self._model()
        buffers = [] if model is None else [buffer for buffer in model.buffers() if not is_lazy(buffer)]
        parameters = [part for each in (*self.parameters().values(), *buffers) for part in tensors_with_memory(each)]
        return {**self.of_optimizers(), "parameters": parameters, **self.gradients()}


def _tensors_in_state(state: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of an optimizer's state, which may be nested, also those of an object of the optimizer's own.

    Objects of such an object are left alone: through them the whole program may be reached.
    """
    remaining, seen = [(state, True)], {}  # containers may hold each other
    while remaining:
        value, opens = remaining.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            remaining.extend((each, opens) for each in value.values())
        elif isinstance(value, (tuple, list)):
            remaining.extend((each, opens) for each in value)
        elif opens and not isinstance(value, (type, ModuleType, torch.nn.Module, torch.optim.Optimizer)):
            remaining.extend((each, False) for each in getattr(value, "__dict__", {}).values())


def _num_parameters(model: torch.nn.Module) -> int:
    """Returns the number of parameters, and of sharded ones (``DTensor``) that of this process's shards."""
    parameters = (each for each in model.parameters() if not is_lazy(each))
    return sum(part.numel() for each in parameters for part in tensors_with_memory(each))


def _device_of(model: torch.nn.Module) -> torch.device:
    """Returns the device of a model, that of new tensors if it has no tensors."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"watch got a {type(model).__name__}, must be a torch.nn.Module: pass the model first")
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    names = ", ".join(sorted(f"{device}" for device in devices))
    if len(devices) > 1:
        raise ValueError(f"the model is on {names}, must be on one device: move it with model.to(...), or watch a part")
    device = devices.pop() if devices else torch.get_default_device()
    if device.type not in {"cpu", "cuda"}:
        raise ValueError(f"the model is on {device}, must be on cpu or cuda: move it with model.to(...)")
    if device.type == "cuda" and device.index not in {None, torch.cuda.current_device()}:
        raise ValueError(
            f"the model is on {device}, must be on the current device cuda:{torch.cuda.current_device()}: call "
            f"torch.cuda.set_device({device.index})"
        )
    return device


def _check_optimizers(optimizers: Iterable[Any]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"watch got a {type(optimizer).__name__}, must be a torch.optim.Optimizer: pass the model, then its "
                "optimizers"
            )
