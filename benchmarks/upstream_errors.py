"""Re-enacts on GPUs what the labs tell of errors in other frameworks; prints what each did, and writes it to a file.

    python -m benchmarks.upstream_errors --out upstream_errors.json          two GPUs with 139 GiB, about two minutes

- ``timers``: verl #4655 times the load of the weights, a copy that runs on after its call has returned, without waiting
- ``clone``: verl #5251's patch copies each gradient before it empties the storage of the original
- ``release``: NeMo Automodel #2634 releases a trainer line by line
- ``crashes``: a step after SkyRL #563's load, whose condition is never true, and the gradients that verl #5251 would
  pass on without its copy; each in a process of its own, since CUDA is lost to a process after such an error

Labs 04 to 06 and 10 quote the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from memlab import GROUPS, Lab, MemorySettings
from memlab.engines.megatron.training_step import train_step
from memlab.engines.protocol import Held
from memlab.lab.environment import hardware, versions
from memlab.lab.stepper import Stepper
from tests.unit.inside import inside

ROUNDS = 9
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SMALL = {"num_layers": 2, "seq_length": 256}

Row = dict[str, Any]


def measure_on_first_gpu() -> list[Row]:
    """Opens a lab of each family after the other, and runs everything that needs its model."""
    rows: list[Row] = []
    with Lab("qwen3-30b-a3b", num_layers=4, seq_length=4096) as lab:
        rows += [_remedy(lab, name) for name in (None, "detach", "clear_gradient", "release_storage")]
        lab.step(MemorySettings())
        rows += inside(lab).run_exclusive(lambda: _timers(inside(lab).stepper))
        lab.step(MemorySettings(**FULL))
        rows += _release(lab, "nothing", clears=True)
    ways: tuple[tuple[Held, bool], ...] = (("nothing", True), ("optimizer", False), ("optimizer", True))
    for held, clears in ways:
        lab = Lab("phi-4", num_layers=4, seq_length=4096)
        lab.step()
        rows += _release(lab, held, clears=clears)
    return rows


def _remedy(lab: Lab, name: str | None) -> Row:
    record = lab.step(MemorySettings(**FULL, checkpoint_input_remedy=name))
    assert record.timeline is not None
    seconds = sorted(lab.step().step_seconds or 0.0 for _ in range(5))
    return {
        "part": "clone",
        "remedy": name,
        "static_bytes": record.static_bytes,
        "residual_bytes": record.residual_bytes,
        "peak_allocated_bytes": record.peak_allocated_bytes,
        "peak_backward_bytes": record.timeline.peak_bytes(phases=["backward"]),
        "allocated_in_backward_bytes": record.timeline.allocated_bytes_in("backward"),
        "loss": record.loss,
        "step_seconds": seconds,
    }


def _release(lab: Lab, held: Held, *, clears: bool) -> list[Row]:
    scenario = f"{lab.scenario}, {lab.settings}"
    moments = lab.release_recipe(held, clears=clears)
    return [
        {
            "part": "release",
            "model": scenario,
            "held": held,
            "clears": clears,
            "after": line,
            "allocated_bytes": found.allocated_bytes,
            "active_bytes": found.active_bytes,
            "reserved_bytes": found.reserved_bytes,
        }
        for line, found in moments.items()
    ]


class _Weights:
    """The DDP buffers of a model, offloaded and loaded as verl's ``megatron_utils.py`` does at the time of #4655.

    Only the host copy differs: it is made once. verl made a new pinned one at each offload (verl #6193).
    """

    def __init__(self, stepper: Stepper) -> None:
        self._buffers = [buffer for _, buffer in stepper.model.engine.live.buffers()]
        self._copies = [torch.empty_like(each.param_data, device="cpu", pin_memory=True) for each in self._buffers]
        self._param_bytes = [each.param_data.untyped_storage().nbytes() for each in self._buffers]
        self._grad_bytes = [each.grad_data.untyped_storage().nbytes() for each in self._buffers]
        self.num_bytes, self.grad_bytes = sum(self._param_bytes), sum(self._grad_bytes)

    def load(self, *, gradients: bool) -> None:
        for number, buffer in enumerate(self._buffers):
            if gradients:
                buffer.grad_data.untyped_storage().resize_(self._grad_bytes[number])
                buffer.grad_data.zero_()
            if not buffer.param_data.untyped_storage().nbytes():
                buffer.param_data.untyped_storage().resize_(self._param_bytes[number])
                buffer.param_data.copy_(self._copies[number], non_blocking=True)

    def load_as_merged(self) -> None:
        self.load(gradients=True)
        self.clean_up()

    def offload_as_merged(self) -> None:
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            if buffer.param_data.untyped_storage().nbytes():
                copy.copy_(buffer.param_data)
                buffer.param_data.untyped_storage().resize_(0)
            buffer.grad_data.untyped_storage().resize_(0)
        self.clean_up()

    def clean_up(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def _timers(stepper: Stepper) -> list[Row]:
    """Times what verl times: to where the call returns, and then to where the device has finished."""
    weights = _Weights(stepper)
    loads: list[tuple[str, Callable[[], None], int]] = [
        ("load, weights only", lambda: weights.load(gradients=False), weights.num_bytes),
        ("load, weights and gradients", lambda: weights.load(gradients=True), weights.num_bytes),
        ("load as merged: also gc.collect and empty_cache", weights.load_as_merged, weights.num_bytes),
        ("gc.collect and empty_cache alone", weights.clean_up, 0),
        ("nothing: the condition is false", lambda: None, 0),
    ]
    rows = [_timed(name, work, num_bytes, before=weights.offload_as_merged) for name, work, num_bytes in loads]
    rows.append(
        _timed("offload as merged", weights.offload_as_merged, weights.num_bytes, before=weights.load_as_merged)
    )
    weights.load_as_merged()
    torch.cuda.synchronize()
    return [row | {"grad_bytes": weights.grad_bytes} for row in rows]


def _timed(name: str, work: Callable[[], None], num_bytes: int, *, before: Callable[[], None]) -> Row:
    returned, finished = [], []
    for _ in range(ROUNDS):
        before()
        torch.cuda.synchronize()
        started = time.time()  # verl's clock
        work()
        returned.append(time.time() - started)
        torch.cuda.synchronize()
        finished.append(time.time() - started)
    return {
        "part": "timers",
        "timed": name,
        "copied_bytes": num_bytes,
        "without_waiting_seconds": returned[1:],
        "with_waiting_seconds": finished[1:],
    }


def crash_inverted_condition() -> None:
    """Takes a step after a load that skipped the gradients: Megatron zeroes its gradient buffers first."""
    with Lab("qwen3-moe-tiny", **SMALL) as lab:
        lab.step()
        with lab.residency_fault("inverted_condition"):
            lab.offload(*GROUPS)
            lab.load(*GROUPS)
            inside(lab).run_exclusive(
                lambda: _report(lambda: train_step(inside(lab).model.engine.live, inside(lab).model.labels))
            )


def crash_inverted_condition_in_backward() -> None:
    """The same, and the step does not zero its gradient buffers: what backward does with them."""
    with Lab("qwen3-moe-tiny", **SMALL) as lab:
        lab.step()
        live = inside(lab).model.engine.live
        with lab.residency_fault("inverted_condition"):
            lab.offload(*GROUPS)
            lab.load(*GROUPS)
            live.chunk.zero_grad_buffer = lambda: None
            inside(lab).run_exclusive(lambda: _report(lambda: train_step(live, inside(lab).model.labels)))


def crash_size_not_saved() -> None:
    """SkyRL #563's load with its condition repaired: megatron-core's own ``grad_data_size`` is 0, and zero_ follows."""
    with Lab("qwen3-moe-tiny", **SMALL) as lab:
        lab.step()
        (buffer,) = inside(lab).model.engine.live.chunk.buffers

        def load() -> None:
            buffer.grad_data.untyped_storage().resize_(0)  # the offload
            buffer.grad_data.storage().resize_(buffer.grad_data_size)
            buffer.grad_data.zero_()

        inside(lab).run_exclusive(lambda: _report(load))


def crash_without_clone() -> None:
    """Passes on the gradient itself, whose storage verl #5251's patch has emptied."""
    _report(pass_on_emptied_gradient)


def pass_on_emptied_gradient() -> None:
    """Does what lab 05 does on the CPU: the backward of a checkpoint, and then that of the layer before it."""
    hidden = torch.ones(1024, device="cuda", requires_grad=True)
    output = hidden.exp()
    leaf = output.detach().requires_grad_()
    leaf.square().sum().backward()
    gradient = leaf.grad
    assert gradient is not None
    gradient.untyped_storage().resize_(0)
    output.backward(gradient)


CRASHES = {
    "inverted condition, first line of the step": crash_inverted_condition,
    "inverted condition, in backward": crash_inverted_condition_in_backward,
    "size not saved, in the load": crash_size_not_saved,
    "no copy of the gradient, in backward": crash_without_clone,
}


def _report(work: Callable[[], object]) -> None:
    """Prints how `work` ends as one line of JSON, and ends the process."""
    where = "nowhere"
    try:
        work()
        ended = "without an error, before the device was waited for"
        torch.cuda.synchronize()
        ended = "without an error"
    except BaseException as error:  # noqa: BLE001  # whatever it is, is what this measures
        frames = traceback.extract_tb(error.__traceback__)
        inner = [frame for frame in frames if "benchmarks" not in frame.filename] or frames
        where = " <- ".join(f"{Path(frame.filename).name}: {frame.line}" for frame in reversed(inner[-3:]))
        ended = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps({"ended": ended, "reported_at": where}), flush=True)
    os._exit(0)


def _crashes(gpu: int) -> list[Row]:
    def run(case: tuple[str, bool]) -> Row:
        name, waits = case
        variables = _environment(gpu) | ({"CUDA_LAUNCH_BLOCKING": "1"} if waits else {})
        command = [sys.executable, "-m", "benchmarks.upstream_errors", "--crash", name]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=120)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"ended"')]
        found = json.loads(lines[-1]) if lines else {"ended": f"exit status {done.returncode}", "reported_at": ""}
        about = {"part": "crashes", "error": name, "launch_blocking": waits, "exit_status": done.returncode}
        return about | found | ({} if lines else {"stderr": done.stderr[-600:]})

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(run, [(name, waits) for name in CRASHES for waits in (False, True)]))


def _environment(gpu: int) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}


def _print(rows: list[Row]) -> None:
    for row in rows:
        shown = {}
        for name, value in row.items():
            if name.endswith("_seconds"):
                least, middle, most = min(value), statistics.median(value), max(value)
                shown[name] = f"{1e3 * middle:.3f} ms ({1e3 * least:.3f} to {1e3 * most:.3f})"
            else:
                shown[name] = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"
        print("  ".join(f"{name} {value}" for name, value in shown.items()), flush=True)


def main() -> None:
    """Measures on the first GPU, and lets processes crash on the second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of results")
    parser.add_argument("--crash", choices=CRASHES, help="only lets this process crash")
    arguments = parser.parse_args()
    if arguments.crash:
        CRASHES[arguments.crash]()
        return
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        crashes = pool.submit(_crashes, torch.cuda.device_count() - 1)
        rows = measure_on_first_gpu()
        rows += crashes.result()
    _print(rows)
    found = {"versions": versions("megatron", None), "hardware": hardware(0), "rows": rows}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1))
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
