"""Transformer Engine's FusedAdam without its kernels: the same storage, and on the CPU the same values.

Precisions, remainders, scales, temporaries and their lifetimes are those of
``transformer_engine/pytorch/optimizers/fused_adam.py`` (2.12.0 and 2.16.1) on a Hopper GPU. Under fp16, FP8 and unlike
moments an update makes fp32 copies of the moments of all parameters of a group, and frees them when it ends: the state
is smaller between updates, and the peak moves into the optimizer. Since 2.13.0 (``fuse_unscale``) the kernel updates
two bf16 moments as they are stored; before, they were copied too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from memlab.backends.simulated_version import imitated
from memlab.meter.labels import one_kernel

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}
"""The value that the largest element of a scaled state is stored as."""
_MODULE = "transformer_engine.pytorch.optimizers"


class Float8State:
    """A state in FP8 (e4m3) with one scale, stored twice, as Hopper's matrix kernels need it.

    Transformer Engine's ``Float8Quantizer.make_empty`` allocates the transpose although Adam never reads it
    (``tensor/float8_tensor.py``).
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.scale = torch.ones([1], dtype=torch.float32, device=like.device)
        self.amax = torch.zeros([1], dtype=torch.float32, device=like.device)
        self.data = torch.empty_like(like, dtype=torch.uint8)
        self.transpose = torch.empty_like(like, dtype=torch.uint8)
        self.scale_inv = torch.empty([1], dtype=torch.float32, device=like.device)

    @one_kernel()
    def store(self, values: torch.Tensor) -> None:
        """Stores fp32 values in units of `scale`, as one cast kernel does."""
        if values.is_meta:
            self.data.copy_(values)
            return
        largest = _LARGEST[torch.uint8]
        scaled = (values * self.scale).clamp_(-largest, largest)
        for stored in (self.data, self.transpose):
            stored.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
        self.scale_inv.copy_(1 / self.scale)

    def float(self) -> torch.Tensor:
        """Returns the values in fp32, in a new tensor."""
        if self.data.is_meta:
            return torch.empty_like(self.data, dtype=torch.float32)
        values = torch.empty_like(self.data, dtype=torch.float32)
        return values.copy_(self.data.view(torch.float8_e4m3fn)).mul_(self.scale_inv)


class FusedAdam(torch.optim.Optimizer):
    """Adam over tensors of mixed precision.

    Args:
        weight_decay: Per step, times the learning rate.
        bias_correction: Divide the moments by what their decay has left out.
        adam_w_mode: Decay the parameters; False adds the decay to the gradients.
        capturable: For CUDA graphs, which memlab does not use; megatron-core 0.19 always passes False.
        master_weights: Keep main parameters here, as the state ``master_param``.
        master_weight_dtype: Of the main parameters: fp32 or fp16.
        exp_avg_dtype: Of the first moment: fp32, fp16, bf16, or uint8, which means FP8.
        exp_avg_sq_dtype: Of the second moment.
        use_decoupled_grad: Read gradients from ``decoupled_grad``, which may have another type than the parameter.
        store_param_remainders: Of fp32 main parameters of bf16 parameters, store only the 16 bits that bf16 lacks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        assert not capturable, "memlab builds no optimizer for CUDA graphs"
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        both_in_bf16 = exp_avg_dtype == exp_avg_sq_dtype == torch.bfloat16
        self._moments_in_place = both_in_bf16 and imitated().updates_bf16_moments_in_place
        self.is_precision_aware = master_weights or {exp_avg_dtype, exp_avg_sq_dtype} != {torch.float32}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None, "Megatron passes none"
        with torch._C.DisableTorchFunction():  # nothing here names a device as text, and all groups are on the device
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                self._update_group(group)

    def _update_group(self, group: dict[str, Any]) -> None:
        # The fp32 copies of all parameters live until the function ends: upstream's lists hold them until the next
        # group's replace them.
        updated: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        gradients: list[torch.Tensor] = []
        for parameter in group["params"]:
            gradient = getattr(parameter, "decoupled_grad", None) if self.use_decoupled_grad else parameter.grad
            if not self.state[parameter]:
                self._initialize(parameter)
            if gradient is not None:
                updated.append((parameter, {name: self._unscaled(parameter, name) for name in self.state[parameter]}))
                gradients.append(gradient)
        for (parameter, states), gradient in zip(updated, gradients, strict=True):
            if not parameter.is_meta:  # the kernel allocates nothing
                _update(parameter, gradient, group, adam_w_mode=self.adam_w_mode, **states)
        for name in self.dtypes:
            if self._has_copies(name):
                for parameter, states in updated:
                    if name in states:
                        self._store(parameter, name, states[name])

    def _initialize(self, parameter: torch.Tensor) -> None:
        try:
            self._make_state(parameter)
        except BaseException:
            self.state[parameter].clear()  # the next step would take an incomplete state for a complete one
            raise

    def _make_state(self, parameter: torch.Tensor) -> None:
        for name in _MOMENTS:
            self._allocate(parameter, name)
        if self.master_weights:
            has_remainder = self.store_param_remainders and parameter.dtype == torch.bfloat16
            self._allocate(parameter, "master_param", torch.int16 if has_remainder else None)
            if not has_remainder:
                initial = parameter.clone().detach().float()
                if self.dtypes["master_param"] == torch.float32:
                    self.state[parameter]["master_param"].copy_(initial)
                else:
                    self._store(parameter, "master_param", initial)

    def _allocate(self, parameter: torch.Tensor, name: str, dtype: torch.dtype | None = None) -> None:
        zeros = torch.zeros_like(parameter, dtype=dtype or self.dtypes[name])
        if zeros.dtype == torch.uint8:
            self.state[parameter][name] = Float8State(parameter)
            self.state[parameter][name].store(zeros.float())
        else:
            self.state[parameter][name] = zeros
        if self.dtypes[name] != torch.float32:
            scale = torch.ones([1], dtype=torch.float32, device=parameter.device)
            self._scales.setdefault(parameter, {})[name] = scale  # of bf16 states too, where nothing reads it

    def _has_copies(self, name: str) -> bool:
        """Whether the kernel gets fp32 copies of a state, which are stored again after it."""
        return self.dtypes[name] != torch.float32 and not (self._moments_in_place and name in _MOMENTS)

    def _unscaled(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a state for the kernel: itself, such as a remainder, or an fp32 copy."""
        stored = self.state[parameter][name]
        if not self._has_copies(name):
            return stored
        values = stored.float()
        return values.mul_(self._scales[parameter][name]) if self.dtypes[name] == torch.float16 else values

    def _store(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Stores fp32 values as the state's type."""
        stored, dtype = self.state[parameter][name], self.dtypes[name]
        if dtype == torch.bfloat16:
            stored.copy_(values.bfloat16())
            return
        if not values.is_meta:
            _scale(values, self._scales[parameter][name], stored, _LARGEST[dtype])
        if isinstance(stored, Float8State):
            stored.store(values)
        else:
            stored.copy_(values)


@one_kernel()  # on a GPU several, on single numbers
def _scale(values: torch.Tensor, scale: torch.Tensor, stored: Any, largest: float) -> None:
    """Sets the scale that stores the largest value as `largest`; the values of an fp16 state are divided in place."""
    lowest, highest = torch.aminmax(values)
    scale.copy_(torch.maximum(-lowest, highest) / largest)
    if isinstance(stored, Float8State):
        # Upstream divides by 0 for a state of zeros, and stores NaN.
        stored.scale.copy_(torch.where(scale > 0, scale.reciprocal(), 1.0))
    else:
        values.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))


@one_kernel()
def _update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    group: dict[str, Any],
    *,
    adam_w_mode: bool,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master_param: torch.Tensor | None = None,
) -> None:
    """Updates a parameter and its states in place, as one kernel (``multi_tensor_adam.cu``).

    Args:
        group: With ``step`` counted.
        exp_avg: In fp32, or in bf16; the kernel computes in fp32.
        exp_avg_sq: Of the same type.
        master_param: In fp32, or int16 as a remainder; None updates the parameter itself.
    """
    if parameter.dtype == torch.float32:
        master_param = None  # allocated, and never read
    remainder = master_param if master_param is not None and master_param.dtype == torch.int16 else None
    if remainder is not None:
        weights = with_remainder(parameter, remainder)
    else:
        weights = (parameter if master_param is None else master_param).float()
    slope, decay = gradient.float(), group["weight_decay"]
    if not adam_w_mode:
        slope = slope + decay * weights
    beta1, beta2 = group["betas"]
    first, second = exp_avg.float(), exp_avg_sq.float()
    first.mul_(beta1).add_(slope, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
    if exp_avg.dtype != torch.float32:
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
    left1, left2 = (1 - beta ** group["step"] if group["bias_correction"] else 1.0 for beta in (beta1, beta2))
    change = (first / left1) / ((second / left2).sqrt_() + group["eps"])
    if adam_w_mode:
        change += decay * weights
    weights = weights - group["lr"] * change
    if remainder is not None:
        split_remainder(weights, parameter, remainder)
        return
    parameter.copy_(weights)
    if master_param is not None:
        master_param.copy_(weights)


def with_remainder(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Returns fp32 main parameters from bf16 parameters and the int16 remainders that `split_remainder` wrote."""
    high = parameter.view(torch.int16).int() - (remainder < 0).int()
    return ((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def split_remainder(weights: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
    """Writes fp32 weights as bf16 parameters, rounded half away from zero, and the other 16 bits as int16."""
    bits = weights.view(torch.int32)
    remainder.copy_(bits << 16 >> 16)
    parameter.view(torch.int16).copy_((bits >> 16) + (remainder < 0).int())


def adam(params: Any, *, adam_w_mode: bool = True, **options: Any) -> torch.optim.Optimizer:
    """Replaces Megatron's Adam on the CPU: torch's, or `FusedAdam` where Megatron asks for precisions."""
    if "exp_avg_dtype" in options:
        return FusedAdam(params, adam_w_mode=adam_w_mode, **options)
    assert adam_w_mode, "Megatron's default"
    return torch.optim.AdamW(params, **options)


@contextmanager
def importable() -> Iterator[None]:
    """Lets Megatron import `FusedAdam` from Transformer Engine, which it does to see its arguments, for the block."""
    module = ModuleType(_MODULE)
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    original = sys.modules.get(_MODULE)
    sys.modules[_MODULE] = module
    try:
        yield
    finally:
        if original is None:
            del sys.modules[_MODULE]
        else:
            sys.modules[_MODULE] = original
