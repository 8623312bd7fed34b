"""Gradients are released and loaded by a reader's own two functions, which cannot access memory that is not there.

A function gets the model as Megatron's DDP has it: lists of buffers, each with its ``grad_data``. The buffers are
stand-ins. On the real ones, code that writes to a storage that is too small ends the process (lab 04 shows it), and an
attribute that the reader adds, such as ``grad_data_size``, would be read by megatron-core later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from memlab.engines.residency.residency import Groups, Residency
from memlab.record.transfer import GROUPS

Move = Callable[[Any], object]
"""A reader's function: it gets the model, with its lists of buffers."""


class OwnGradientMoves(Residency):
    """Transfers of gradients that the reader wrote; parameters and optimizer state are transferred as always.

    Args:
        buffers: DDP's buffers, each with the name of the list that it is in.
        release: Frees the gradients' memory.
        load: Gives it back, zeroed.
    """

    def __init__(self, groups: Groups, buffers: Sequence[tuple[str, Any]], release: Move, load: Move) -> None:
        super().__init__(groups)
        self._buffers = [(name, _Buffer(buffer.grad_data, buffer.grad_dtype)) for name, buffer in buffers]
        # A model of one dtype has one buffer in each list: code that relies on it is noticed by these.
        names = [name for number, name in enumerate({name: None for name, _ in buffers}, 1) for _ in range(number)]
        self._others = [(name, _Buffer(torch.zeros(8), torch.float32)) for name in names]
        self._gradients = [buffer.gradients for _, buffer in self._buffers]
        self._release, self._load = release, load
        self._model = _Model()  # one for all calls: it keeps an attribute that a function adds

    def offload(self, groups: Collection[str]) -> dict[str, int]:
        """Offloads as always, and gradients by the reader's function.

        Raises:
            ValueError: If that function writes to memory that is not there, or puts something in the gradients' place.
        """
        freed = super().offload([group for group in groups if group != "gradients"])
        return freed | self._moved(self._release, groups)

    def load(self, groups: Collection[str] = GROUPS) -> dict[str, int]:
        """Loads as always, and gradients by the reader's function.

        Raises:
            ValueError: If that function writes to memory that is not there, leaves in it what was there before, or puts
                something in the gradients' place.
        """
        taken = super().load([group for group in groups if group != "gradients"])
        taken |= self._moved(self._load, groups)
        if "gradients" in groups:
            for _, buffer in [*self._buffers, *self._others]:
                buffer.gradients.require_zeroed()
        return taken

    def _moved(self, move: Move, groups: Collection[str]) -> dict[str, int]:
        if "gradients" not in groups:
            return {}
        before = self._num_bytes()
        for name in _LISTS:
            setattr(self._model, name, [mine for of, mine in [*self._buffers, *self._others] if of == name])
        try:
            move(self._model)
        except TypeError as error:
            if "StandIn'" not in f"{error}":
                raise
            named = f"{error}".replace("_GradDataStandIn", "grad_data").replace("_StorageStandIn", "storage")
            raise ValueError(f"your code does what needs a real tensor ({named}): {_ENOUGH}") from error
        if any(getattr(mine, "grad_data", None) is not mine.gradients for _, mine in [*self._buffers, *self._others]):
            raise ValueError(_REPLACED)
        for name, other in self._others:
            mine = [buffer.gradients.is_on_device for of, buffer in self._buffers if of == name]
            if other.gradients.is_on_device not in mine:
                raise ValueError(
                    f"your code leaves out the last buffer of {name}, must go through the whole list: a list can have "
                    "several buffers, one per dtype"
                )
        moved = abs(self._num_bytes() - before)
        return {"gradients": moved} if moved else {}

    def _num_bytes(self) -> int:
        return sum(gradients.storage_bytes for gradients in self._gradients)


_LISTS = ("buffers", "expert_parallel_buffers")
"""The attributes of ``megatron.core.distributed.DistributedDataParallel`` with buffers."""


class _Model:
    """Stands in for DDP; it has its lists of buffers, and what the reader adds to it."""


class _Buffer:
    """Stands in for a buffer of DDP; what the reader adds to it stays here.

    Since 0.16, megatron-core's buffer has an attribute ``grad_data_size``, which is 0 until its own offload sets it.
    """

    def __init__(self, grad_data: torch.Tensor, grad_dtype: torch.dtype) -> None:
        self.grad_data = self.gradients = _GradDataStandIn(grad_data)
        self.grad_dtype = grad_dtype
        self.numel = grad_data.numel()
        self.grad_data_size = 0


class _StandIn:
    """What a reader's code gets in place of a tensor or a storage; it says itself what it cannot do."""

    def __getattr__(self, name: str) -> NoReturn:
        # hasattr and getattr with a default answer as for a tensor without the attribute.
        raise AttributeError(f"no attribute {name!r} here: {_ENOUGH}", name=name, obj=self)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        _: object,
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        if function.__name__ == "__get__":  # an attribute of every tensor, such as grad
            raise AttributeError(f"your code asks for what a real tensor has: {_ENOUGH}")
        own: Any = getattr(cls, function.__name__, None)
        is_own = isinstance(own, FunctionType) and own.__module__ == __name__
        if is_own and arguments and isinstance(arguments[0], cls):
            return own(*arguments, **(named or {}))  # such as torch.zero_, or torch.Tensor.zero_
        if function is torch.zeros_like:
            return torch.zeros(arguments[0].shape, dtype=arguments[0].dtype, device=arguments[0].device)
        raise ValueError(f"your code calls torch's {function.__name__}, which needs a real tensor: {_ENOUGH}")


if TYPE_CHECKING:
    _Tensor = object  # a stand-in has fewer arguments than a tensor's methods
else:
    _Tensor = torch.Tensor

_REPLACED = (
    "your code puts something in the place of grad_data, must leave it: that frees nothing, because the gradient of "
    "every parameter is a view of the same storage; empty the storage with resize_(0)"
)
_ENOUGH = (
    "grad_data.zero_() fills it with zeros; all else needs only its storage() or untyped_storage(), with size() and "
    "resize_()"
)


class _GradDataStandIn(_StandIn, _Tensor):
    """Stands in for the tensor ``grad_data``; it is a tensor, so that methods of torch's class accept it."""

    def __new__(cls, _: torch.Tensor) -> Self:
        return torch.empty(0, device="meta").as_subclass(cls)  # type: ignore[type-var]  # at run time a tensor

    def __init__(self, real: torch.Tensor) -> None:
        self._real = real
        self._is_unwritten = False
        self._is_sized_in_bytes = False

    dtype = property(lambda self: self._real.dtype)
    device = property(lambda self: self._real.device)
    shape = property(lambda self: self._real.shape)
    __repr__ = object.__repr__

    @property
    def data(self) -> _GradDataStandIn:
        return self

    @data.setter
    def data(self, _: object) -> NoReturn:
        raise ValueError(_REPLACED)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    @property
    def is_on_device(self) -> bool:
        """Whether all of its memory is there."""
        return self.storage_bytes >= self.nbytes

    @property
    def storage_bytes(self) -> int:
        """The bytes that are allocated."""
        return self._real.untyped_storage().nbytes()

    @property
    def itemsize(self) -> int:
        return self.element_size()

    def size(self, dimension: int | None = None) -> torch.Size | int:
        return self.shape if dimension is None else self.shape[dimension]

    def numel(self) -> int:
        return self._real.numel()

    nelement = __len__ = numel  # the tensor has one dimension

    def element_size(self) -> int:
        return self._real.element_size()

    def untyped_storage(self) -> _StorageStandIn:
        return _StorageStandIn(self, unit=1)

    def storage(self) -> _StorageStandIn:
        return _StorageStandIn(self, unit=self.element_size())

    def resize(self, size: int, unit: int) -> None:
        """Resizes the storage to so many units of bytes; memory that is new holds whatever was there before."""
        num_bytes = size * unit
        self._is_sized_in_bytes = unit == 1
        is_larger = num_bytes > self.storage_bytes
        self._real.untyped_storage().resize_(num_bytes)
        if is_larger and num_bytes >= self.nbytes:
            self._real.fill_(torch.nan)
            self._is_unwritten = True

    def zero_(self) -> _GradDataStandIn:
        if self._is_sized_in_bytes and self.storage_bytes == self.numel():
            raise ValueError(
                f"your code gives the gradients {self.storage_bytes:,} bytes, must give them {self.nbytes:,}: resize_ "
                "of untyped_storage() takes bytes, which are numel() * element_size()"
            )
        if not self._is_sized_in_bytes and self.storage_bytes == self.nbytes * self.element_size():
            raise ValueError(
                f"your code gives the gradients {self.storage_bytes:,} bytes, must give them {self.nbytes:,}: resize_ "
                "of storage() takes numbers, which are numel()"
            )
        if self.storage_bytes < self.nbytes:
            raise ValueError(
                f"your code zeroes {self.nbytes:,} bytes of gradients whose storage has {self.storage_bytes:,} bytes, "
                "must have as many: on a real buffer this is a segmentation fault or an illegal memory access"
            )
        self._real.zero_()
        self._is_unwritten = False
        return self

    def view(self, *_: object) -> _GradDataStandIn:
        """Returns itself: a view of all elements shares all of the memory."""
        return self

    detach = flatten = ravel = reshape = view

    def fill_(self, value: float) -> _GradDataStandIn:
        if value:
            raise ValueError(f"your code fills the gradients with {value:g}, must be 0: the next backward adds to them")
        return self.zero_()

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> _GradDataStandIn:
        if source.expand(self.shape).any():
            raise ValueError(
                "your code copies numbers into the gradients that are not 0, must be 0: the next backward adds to them"
            )
        return self.zero_()

    def __setitem__(self, index: object, value: float) -> None:
        if index not in (slice(None), ...) or isinstance(value, torch.Tensor):
            raise ValueError(
                "your code sets some of the gradients, or sets them to a tensor, must set all of them to one number: "
                "write grad_data[:] = 0 or grad_data.zero_()"
            )
        self.fill_(value)

    def require_zeroed(self) -> None:
        if self._is_unwritten:
            raise ValueError(
                "your load gives the gradients memory and does not zero it, must fill it with zeros: call "
                "grad_data.zero_() after resize_, because backward adds to what is there"
            )


class _StorageStandIn(_StandIn):
    """Stands in for a storage, whose sizes are in elements (``storage()``) or in bytes (``untyped_storage()``)."""

    def __init__(self, gradients: _GradDataStandIn, *, unit: int) -> None:
        self._gradients, self._unit = gradients, unit

    def size(self) -> int:
        return self._gradients.storage_bytes // self._unit

    def nbytes(self) -> int:
        return self._gradients.storage_bytes

    def resize_(self, size: int) -> _StorageStandIn:
        self._gradients.resize(size, self._unit)
        return self

    def fill_(self, value: float) -> _StorageStandIn:
        """Fills what is allocated, as torch does, which for an empty storage is nothing."""
        if self.nbytes() >= self._gradients.nbytes:
            self._gradients.fill_(value)
        return self

    __len__ = size
