"""The CPU as a stand-in for CUDA: what is host, what is device, and that the stand-ins hold in backward too."""

from __future__ import annotations

import pytest
import torch

from memlab.backends.cpu import stand_in
from memlab.backends.cuda_calls import is_on_host


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
    ],
)
def test_a_tensor_is_where_a_gpu_job_would_have_it(make: object, on_host: bool) -> None:
    with stand_in():
        assert is_on_host(make()) is on_host  # type: ignore[operator]


def test_a_transfer_copies_and_staying_does_not() -> None:
    with stand_in():
        device = torch.arange(3.0, device="cuda")
        host = device.cpu()
        host[0] = 7.0
        assert device[0] == 0.0
        assert device.cuda() is device
        assert host.cpu() is host
        assert host.cuda().tolist() == [7.0, 1.0, 2.0]


def test_types_and_streams_answer_as_cuda_does() -> None:
    with stand_in():
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

    with stand_in():
        inputs = torch.ones(2, device="cuda", requires_grad=True)
        torch.autograd.backward(Allocates.apply(inputs).sum())
        assert seen == [True]
        assert inputs.grad is not None and inputs.grad.tolist() == [1.0, 1.0]
