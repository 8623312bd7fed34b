"""The labels of a step's current moment: phase, module, and whether it recomputes or is inside one fused kernel.

The meter writes them into every event. Phases come from Megatron's own timers, modules from `ModuleTracker`: no call
stack is ever read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch.utils.hooks import RemovableHandle

from memlab.meter.module_tracker import ModuleTracker
from memlab.meter.stream_order import StreamOrder
from memlab.vocabulary import CATEGORIES, PHASES, place_in_words

_P = ParamSpec("_P")
_R = TypeVar("_R")

Product = Literal["forward", "backward", "forward with bias", "backward with bias", "linear", "grouped linear"]
"""Matrix products that have workspaces of their own: torch's, on the thread of forward and on that of backward, without
and with a bias, and Transformer Engine's, of linears and of grouped ones."""
PRODUCTS: tuple[Product, ...] = get_args(Product)


class Labels:
    """The current labels of one lab. One thread at a time changes them: its own waits while autograd's runs."""

    def __init__(self) -> None:
        self.phase, self.module = PHASES.index("idle"), 0
        self.modules: list[str] = [""]
        self.span = 0
        """Grows with every change of phase and at both ends of a recomputation: a storage that is allocated and freed
        in the same span never waited for backward."""
        self.num_passes = 0
        """Forward and backward passes begun in this lab."""
        self.num_repeated = 0
        """Passes through layers in this lab that only repeated others."""
        self.passes_in_flight = 0
        """Forward passes of this step whose backward has not ended; after a step that ended early, at its end."""
        self.recomputing = False
        self.fused_depth = 0
        """How many fused kernels enclose the current operation (a kernel may be built from others)."""
        self.user_buffer_depth = 0
        """Above 0 while new storages are parts of Transformer Engine's user buffers, outside torch's allocator."""
        self.host_depth = 0
        """Above 0 while new storages are host memory."""
        self.pinned_depth = 0
        """Above 0 while new storages are pinned host memory, which torch's host allocator rounds."""
        self.stream = 0
        """The number of the current CUDA stream, 0 for the default one: torch's allocator has pools for each."""
        self.stream_order = StreamOrder()
        self.known_category: int | None = None
        """The category of new storages, if the code that makes them knows it, such as activations copied back from
        the host."""
        self.on_move: Callable[[], None] | None = None
        """Called when a phase begins or a module is entered; an error that it raises ends the step there."""
        self.on_kernel: Callable[[Callable[..., Any], Any, dict[str, Any]], Any] | None = None
        """Calls a function that `one_kernel` decorates, given with its arguments, as one kernel, if it is set."""
        self.on_kernel_end: Callable[[], None] | None = None
        self.on_kept: Callable[[Iterable[torch.Tensor]], None] | None = None
        """Called with the tensors that `kept_by_collective` reports."""
        self.on_timing: Callable[[int], None] | None = None
        """Called with the bytes that timing the variants of a kernel takes, where it takes some."""
        self.timed_kernels: set[Hashable] = set()
        """Those that have been called since the process began."""
        self.awaited_product: Product | None = None
        """A kind of matrix products, while new storages are workspaces that are allocated at the first of them."""
        self.on_product: Callable[[Product], None] | None = None
        """Called with the kind of each matrix product, as long as a workspace waits for one."""
        self.on_other_user: Callable[[torch.Tensor], None] | None = None
        """Called with the tensors that `used_by_another_stream` reports."""
        self.on_record_stream: Callable[[torch.Tensor, int], None] | None = None
        """Called with the tensors and streams that `record_stream` reports."""
        self.is_followed: Callable[[torch.Tensor], bool] = lambda tensor: False
        """Whether the meter has nothing to learn from a view of a tensor."""
        self.on_change: Callable[[], None] | None = None
        """Called after every change of phase, module, span or recomputation, on the thread that made it."""
        self._codes: dict[str, int] = {"": 0}
        self._tracked, self._hooks = list[tuple[str, torch.nn.Module]](), list[RemovableHandle]()
        self._tracker = ModuleTracker(lambda: self.module, self.enter_module, self._return_to_module)

    @property
    def place(self) -> str:
        """Phase and module in words, such as ``forward of decoder.layers.2.mlp``."""
        return place_in_words(PHASES[self.phase], self.modules[self.module])

    def enter_phase(self, name: str) -> None:
        """Starts a phase (one of `PHASES`) and ends the current one."""
        self.phase = PHASES.index(name)
        self.span += 1
        if name in ("forward", "backward"):
            self.num_passes += 1
        self._tracker.restart()
        self.enter_module(0)

    def enter_module(self, code: int) -> None:
        """Makes a module the current one; `code` is a result of the method `code`."""
        self.module = code
        self.changed()
        if self.on_move is not None:
            self.on_move()

    def _return_to_module(self, code: int) -> None:
        self.module = code
        self.changed()

    def changed(self) -> None:
        """Reports to the meter that a label has changed."""
        if self.on_change is not None:
            self.on_change()

    @contextmanager
    def phase_of(self, name: str) -> Iterator[None]:
        """Runs the block as one phase; it is idle afterwards, after an error too."""
        try:
            self.enter_phase(name)
            yield
        finally:
            self.enter_phase("idle")

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Marks the storages that the block allocates as recomputed."""
        outer, self.recomputing = self.recomputing, True
        self.span += 1
        self.changed()
        try:
            yield
        finally:
            self.recomputing = outer
            self.span += 1
            self.changed()

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """Sets the category of the storages that the block allocates: a name of `memlab.vocabulary.CATEGORIES`."""
        outer, self.known_category = self.known_category, CATEGORIES.index(name)
        self.changed()
        try:
            yield
        finally:
            self.known_category = outer
            self.changed()

    def code(self, module_name: str) -> int:
        """Returns the index of a module name, adding it if it is new."""
        code = self._codes.get(module_name)
        if code is None:
            code = self._codes[module_name] = len(self.modules)
            self.modules.append(module_name)
        return code

    def attach(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Puts hooks on a model's modules, under their names; the model itself, which has none, is ``gpt_model``."""
        self._tracked = list(modules)
        self._hooks = self._tracker.track((self.code(name or "gpt_model"), module) for name, module in self._tracked)

    def begin_module(self, code: int) -> None:
        """Begins a module's forward, where no hook of `attach` does; `code` is a result of the method `code`."""
        self._tracker.begin(code)

    def end_module(self, output: object) -> None:
        """Ends the forward that was begun last; its output is None if it raised an error."""
        self._tracker.end(output)

    def detach(self) -> None:
        """Takes the hooks off the model's modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Runs the block without the hooks, as the model runs outside a lab."""
        self.detach()
        try:
            yield
        finally:
            self.attach(self._tracked)

    def release(self) -> None:
        """Drops the model."""
        self._hooks.clear()
        self._tracked.clear()


_of_threads: dict[int, Labels] = {}
"""The labels in use, by the thread (`threading.get_ident`) that works under them."""
_of_process: list[Labels] = []
"""At most one: of work on a GPU, whose backward runs on a thread of autograd's own."""
_changing = threading.Lock()


def _active() -> Labels | None:
    return _of_threads.get(threading.get_ident()) or (_of_process[0] if _of_process else None)


def timed_at_first_call(kernel: Hashable, num_bytes: int) -> None:
    """Reports that the variants of a kernel are timed, if it is called for the first time.

    Args:
        kernel: With all by which variants are chosen.
        num_bytes: What timing takes of the device's memory.
    """
    labels = _active()
    if labels is not None and labels.on_timing is not None and kernel not in labels.timed_kernels:
        labels.timed_kernels.add(kernel)
        labels.on_timing(num_bytes)


@contextmanager
def allocated_at_first(product: Product | None) -> Iterator[None]:
    """Runs the block with new storages that get their memory at the first matrix product of a kind.

    They count as allocated from now on: a pass in which such a product comes first has the events of all others.

    Args:
        product: The kind, as `multiplies` reports it; None if they get their memory now.
    """
    labels = _active()
    if labels is None:
        yield
        return
    outer, labels.awaited_product = labels.awaited_product, product
    try:
        yield
    finally:
        labels.awaited_product = outer


def multiplies(product: Product) -> None:
    """Reports a matrix product of a kind, before what it computes is used."""
    labels = _active()
    if labels is not None and labels.on_product is not None:
        labels.on_product(product)


def require_free(labels: Labels, *, whole_process: bool) -> None:
    """Checks that these labels can be in use beside those that are in use now.

    Args:
        labels: Those of who asks.

    Raises:
        ValueError: If others are those of the whole process, or these are to be and there are others.
    """
    others = [each for each in _of_threads.values() if each is not labels]
    if others and (whole_process or any(each is not labels for each in _of_process)):
        raise ValueError(
            "on a GPU memlab meters the whole process, one lab or one watched block at a time, and in this process "
            "another lab works or another block is watched: leave that block, or wait for the step, first"
        )


@contextmanager
def labelled_by(labels: Labels, *, whole_process: bool = False) -> Iterator[None]:
    """Makes `labels` those that `one_kernel`, `on_host`, `on_stream` and `keeping` change on this thread.

    Args:
        labels: A thread works under one at a time.
        whole_process: Whether they are those of every other thread too, as on a GPU: there the allocator's history is
            the process's, and backward runs on a thread of autograd's own.

    Raises:
        ValueError: As `require_free`, or if the thread has labels already.
    """
    thread = threading.get_ident()
    with _changing:
        if thread in _of_threads:
            raise ValueError(
                "memlab meters one lab or one watched block at a time on a thread, and this thread is in another "
                "block: leave that block first"
            )
        require_free(labels, whole_process=whole_process)
        _of_threads[thread] = labels
        if whole_process:
            _of_process.append(labels)
    try:
        yield
    finally:
        with _changing:  # perhaps on another thread, which has closed the generator that entered the block
            del _of_threads[thread]
            if whole_process:
                _of_process.remove(labels)


class one_kernel:  # noqa: N801  # a context, as those of contextlib
    """Runs a block, or as a decorator a function, as one fused GPU kernel: what is freed inside it stays on chip.

    The meter counts such storages in the ``on_chip`` pool, and moves those that outlive the block to the device. A
    variable that is bound inside a block outlives it; inside a decorated function it does not.
    """

    __slots__ = ("_labels",)

    def __enter__(self) -> None:
        labels = self._labels = _active()
        if labels is not None:
            labels.fused_depth += 1

    def __exit__(self, *_: object) -> None:
        labels = self._labels
        if labels is not None:
            labels.fused_depth -= 1
            if labels.fused_depth == 0 and labels.on_kernel_end is not None:
                labels.on_kernel_end()

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Returns a function that runs as one kernel."""

        @wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            labels = _active()
            if labels is not None and labels.on_kernel is not None and not labels.fused_depth:
                return labels.on_kernel(function, args, kwargs)
            with one_kernel():
                return function(*args, **kwargs)

        return run


@contextmanager
def in_user_buffer(active: bool = True) -> Iterator[None]:
    """Runs the block with its new storages in user buffers of Transformer Engine, which torch does not allocate.

    The meter counts them in the ``on_chip`` pool, however long they live.

    Args:
        active: Whether they are; otherwise they are on the device as usual.
    """
    labels = _active()
    if labels is None or not active:
        yield
        return
    labels.user_buffer_depth += 1
    try:
        yield
    finally:
        labels.user_buffer_depth -= 1


@contextmanager
def on_host(*, pinned: bool = False) -> Iterator[None]:
    """Runs the block with its new storages in host memory, which torch pins if `pinned`."""
    labels = _active()
    if labels is None:
        yield
        return
    labels.host_depth += 1
    labels.pinned_depth += pinned
    try:
        yield
    finally:
        labels.host_depth -= 1
        labels.pinned_depth -= pinned


def kept_by_collective(tensors: Iterable[torch.Tensor]) -> None:
    """Reports tensors that torch may keep for a collective after everyone else has let go of them."""
    labels = _active()
    if labels is not None and labels.on_kept is not None:
        labels.on_kept(tensors)


def used_by_another_stream(tensor: torch.Tensor) -> None:
    """Reports a tensor that another stream uses too, while a CUDA graph is captured."""
    labels = _active()
    if labels is not None and labels.on_other_user is not None:
        labels.on_other_user(tensor)


def record_stream(tensor: torch.Tensor, stream: int) -> None:
    """Reports that a stream uses a tensor, as ``Tensor.record_stream`` tells torch's allocator.

    Args:
        tensor: Whose memory waits for the stream, once it is freed.
        stream: Its number, or `memlab.meter.stream_order.SENDING`.
    """
    labels = _active()
    if labels is not None and labels.on_record_stream is not None:
        labels.on_record_stream(tensor, stream)


def stream_order() -> StreamOrder:
    """Returns what is known of the order of the streams' work."""
    labels = _active()
    return StreamOrder() if labels is None else labels.stream_order


def current_stream() -> int:
    """Returns the number of the current CUDA stream, 0 for the default one."""
    labels = _active()
    return 0 if labels is None else labels.stream


def is_followed(tensor: torch.Tensor) -> bool:
    """Whether the meter has nothing to learn from a view of a tensor.

    False without a meter: a dispatch mode is then somebody else's, such as torch's `FakeTensorMode`.
    """
    labels = _active()
    return labels is not None and labels.is_followed(tensor)


@contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Makes a CUDA stream the current one for the block."""
    labels = _active()
    if labels is None:
        yield
        return
    outer, labels.stream = labels.stream, number
    try:
        yield
    finally:
        labels.stream = outer


def keeping(category: str) -> AbstractContextManager[None]:
    """Returns a context in which new storages have this category, a name of `memlab.vocabulary.CATEGORIES`."""
    labels = _active()
    return nullcontext() if labels is None else labels.category(category)
