"""The CPU as a stand-in for CUDA: what is host, what is device, and that the stand-ins hold in backward too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from memlab.backends.cpu import cuda_replaced
from memlab.backends.cuda_on_cpu import FACTORIES, is_on_host
from memlab.meter.labels import Labels, labelled_by
from memlab.meter.storage_meter import plain_meter


@pytest.mark.parametrize(
    ("make", "on_host"),
    [
        (lambda: torch.empty(3), True),
        (lambda: torch.tensor([1, 2]), True),
        (lambda: torch.zeros(3, device="cpu"), True),
        (lambda: torch.zeros(3, device="cuda"), False),
        (lambda: torch.zeros(3, device="cuda:0"), False),
        (lambda: torch.zeros(3, device=torch.cuda.current_device()), False),
        (lambda: torch.zeros(3, device=torch.zeros(1, device="cuda").device), False),
        (lambda: torch.zeros(3).cuda(), False),
        (lambda: torch.zeros(3).to("cuda"), False),
        (lambda: torch.zeros(3).to(torch.device("cuda")), False),
        (lambda: torch.zeros(3).to("cuda", torch.int32), False),
        (lambda: torch.zeros(3, device="cuda").cpu(), True),
        (lambda: torch.zeros(3, device="cuda").to("cpu"), True),
        (lambda: torch.zeros(3, device="cuda").pin_memory(), True),
        (lambda: torch.empty(3, device="cuda").new_empty(4), False),
        (lambda: torch.empty_like(torch.empty(3, device="cuda"), device="cpu", pin_memory=True), True),
        (lambda: torch.randperm(4), True),
        (lambda: torch.randperm(4, device="cuda"), False),
        (lambda: torch.scalar_tensor(2.0), True),
        (lambda: torch.scalar_tensor(2.0, device="cuda"), False),
        (lambda: torch.logspace(0, 1, 3), True),
        (lambda: torch.logspace(0, 1, 3, device="cuda"), False),
        (lambda: torch.from_numpy(np.ones(3)), True),
        (lambda: torch.from_numpy(np.ones(3)).cuda(), False),
        (lambda: torch.as_tensor([1, 2]), True),
        (lambda: torch.as_tensor([1, 2], device="cuda"), False),
        (lambda: torch.as_tensor(torch.zeros(3, device="cuda")), False),
        (lambda: torch.as_tensor(torch.zeros(3), device="cuda"), False),
        (lambda: torch.normal(0.0, 1.0, (3,)), True),
        (lambda: torch.normal(0.0, 1.0, (3,), device="cuda"), False),
        (lambda: torch.normal(torch.zeros(3, device="cuda"), 1.0), False),
    ],
)
def test_a_tensor_is_where_a_gpu_job_would_have_it(make: object, on_host: bool) -> None:
    with cuda_replaced():
        assert is_on_host(make()) is on_host  # type: ignore[operator]


def test_every_function_that_chooses_its_device_is_a_factory() -> None:
    # By torch's own schemas: functions that take a device and no tensor. Others make no dense tensor.
    others = {"_", "sparse_", "fft_", "empty_quantized", "from_file", "vander", "complex", "polar"}
    named: set[str] = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        types = {argument.name: str(argument.type) for argument in schema.arguments}
        if "device" in types and "pin_memory" in types and not any("Tensor" in kind for kind in types.values()):
            named.add(name)
    functions = {name for name in named if not name.startswith(tuple(others)) and hasattr(torch, name)}
    assert len(functions) > 20
    assert {name for name in functions if getattr(torch, name) not in FACTORIES} == set()


@pytest.mark.parametrize("make", [lambda: torch.from_numpy(np.ones(3)), lambda: torch.as_tensor([1.0, 2.0, 3.0])])
def test_the_meter_counts_on_the_host_what_no_operation_makes(make: Callable[[], torch.Tensor]) -> None:
    labels = Labels()
    meter = plain_meter(labels)
    with cuda_replaced(), labelled_by(labels), meter.watching():
        made = make()
        assert meter.pool_of(made) == "host"


def test_a_transfer_copies_and_staying_does_not() -> None:
    with cuda_replaced():
        device = torch.arange(3.0, device="cuda")
        host = device.cpu()
        host[0] = 7.0
        assert device[0] == 0.0
        assert device.cuda() is device
        assert host.cpu() is host
        assert host.cuda().tolist() == [7.0, 1.0, 2.0]


def test_types_and_streams_answer_as_cuda_does() -> None:
    with cuda_replaced():
        tensor = torch.zeros(2, dtype=torch.bfloat16, device="cuda")
        assert tensor.type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2).type() == "torch.FloatTensor"
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor.record_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        event.record()
        torch.cuda.current_stream().wait_event(event)


def test_the_stand_ins_hold_inside_backward() -> None:
    seen: list[bool] = []

    class Allocates(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return inputs * 1

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(is_on_host(torch.empty(1, device="cpu", pin_memory=True)))
            return grads[0]

    with cuda_replaced():
        inputs = torch.ones(2, device="cuda", requires_grad=True)
        torch.autograd.backward(Allocates.apply(inputs).sum())
        assert seen == [True]
        assert inputs.grad is not None and inputs.grad.tolist() == [1.0, 1.0]
