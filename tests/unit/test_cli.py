"""The command line: what it refuses, what it prints, and that its result stands alone on stdout."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import types
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest
from jupyter_server.services.config.manager import ConfigManager
from jupyterlab.commands import get_app_dir

from memlab.cli import main, one_line
from memlab.commands import doctor
from memlab.commands.shared.process import stdout_reserved_for_result
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from tests.unit.builders import record_of, training_step

# What `measure` and `predict` promise to every reader of their JSON.
PROMISED_KEYS = {
    "static_bytes",
    "peak_allocated_bytes",
    "activation_peak_bytes",
    "peak_by_category",
    "residual_bytes",
    "host_bytes",
    "offloaded_bytes_by_module",
    "load_seconds",
    "offload_seconds",
    "step_seconds",
    "tokens_per_second",
    "loss",
    "settings",
    "scenario",
    "versions",
}


class FakeLab:
    """Takes no step and is as talkative as Megatron."""

    settings: ClassVar[MemorySettings | None] = None
    arguments: ClassVar[dict[str, Any]] = {}

    def __init__(self, architecture: object, **arguments: Any) -> None:
        type(self).arguments = arguments | {"architecture": architecture}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        sys.stdout.write("closing\n")

    def step(self, settings: MemorySettings) -> StepRecord:
        sys.stdout.write("a step\n")
        os.write(1, b"from below\n")
        ctypes.CDLL(None).puts(b"from C")
        type(self).settings = settings
        return record_of(training_step(), settings)


@pytest.fixture
def fake_lab(monkeypatch: pytest.MonkeyPatch) -> type[FakeLab]:
    monkeypatch.setitem(sys.modules, "memlab.lab.lab", types.SimpleNamespace(Lab=FakeLab))
    backend = types.SimpleNamespace(check=lambda _: None)
    monkeypatch.setattr("memlab.backends.find_backend", lambda _: backend)
    return FakeLab


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("measure nope", "architecture 'nope' is neither a known name nor"),
        ("measure phi-4-tiny --num-layers x", "argument --num-layers: 'x' is not a whole number"),
        (
            "measure phi-4-tiny --expert-buffers",
            "expert_buffers is True, must be False, or True for an MoE architecture (phi-4-tiny has 0 experts)",
        ),
        ("measure phi-4-tiny --micro-batch-size 0", "micro_batch_size is 0, must be a whole number of at least 1"),
        ("measure phi-4-tiny --dtype fp8", "dtype is 'fp8', must be one of bf16, fp32"),
        ("measure phi-4-tiny --seq-len 8", "unrecognized arguments: --seq-len 8"),
        (
            "predict --model phi-4-tiny",
            "give the model without a flag, as the first argument: see memlab predict --help",
        ),
        ("predict phi-4-tiny --seq-lenght 8", "did you mean --seq-length? All flags: see memlab predict --help"),
        (
            "measure phi-4-tiny --recompute-granularity some",
            "recompute_granularity is 'some', must be one of full, sel",
        ),
        ("measure phi-4-tiny --recompute-modules mlp", "recompute_modules is ['mlp'], but only recompute_granularity"),
        (
            "measure phi-4-tiny --recompute-granularity full --recompute-method uniform",
            "recompute_method 'uniform' needs recompute_num_layers",
        ),
        (
            "measure phi-4-tiny --recompute-granularity full --recompute-method uniform --recompute-num-layers 5",
            "recompute_num_layers is 5, but the model has 4 layers",
        ),
        ("measure phi-4-tiny --offload-modules=", "offload_modules is an empty list: name at least one of"),
        (
            "measure phi-4-tiny --offload-modules core_attn,nope",
            "offload_modules has ['nope'], which memlab does not model",
        ),
        (
            "measure qwen3-moe-tiny --offload-modules MoE_Act,core-attn",
            "offload_modules has ['MoE_Act', 'core-attn'], must be names as Megatron writes them, one by one: write ['moe_a",
        ),
        ("measure phi-4-tiny --offload-modules attn_proj", "offload_modules has 'attn_proj' without 'core_attn'"),
        ("measure phi-4-tiny --offload-modules moe_act", "offload_modules has ['moe_act'], which only MoE layers have"),
        (
            "measure qwen3-moe-tiny --offload-modules moe_act --recompute-granularity selective --recompute-modules=moe",
            "offload_modules has ['moe_act'] under selective recompute of 'moe'",
        ),
        (
            "measure phi-4-tiny --min-offloaded-tensor-size -1",
            "min_offloaded_tensor_size is -1, must be a whole number",
        ),
        ("measure phi-4-tiny --backend tpu", "backend is 'tpu', must be one of auto, cpu"),
        ("measure phi-4-tiny --snapshot", "--snapshot has no folder to write to: give --out FOLDER"),
        ("measure", "ARCH is missing: give one of"),
        ("", "the following arguments are required: COMMAND: see memlab --help"),
        ("mesure phi-4-tiny", "argument COMMAND: invalid choice: 'mesure' (choose from"),
        ("run missing.ipynb", "notebook missing.ipynb does not exist"),
        (
            "run labs/00_quickstart.ipynb -p seq 8",
            "unknown parameter seq: choose from architecture, dense_architecture, seq_length, num_layers",
        ),
        ("run labs/00_quickstart.ipynb -p seq_length 1e3", "parameter seq_length is '1e3', must be a whole number"),
        ("run labs/00_quickstart.ipynb -p seq_length 8 -p seq_length 9", "parameter seq_length is given twice"),
        ("run labs/00_quickstart.ipynb --timeout 0", "timeout is 0 seconds, must be above 0 and at most a week"),
        ("run labs/00_quickstart.ipynb --timeout nan", "timeout is nan seconds, must be above 0"),
        ("run labs/00_quickstart.ipynb --out labs", "is not empty, and a run overwrites nothing: give another folder"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(
    arguments: str, refusal: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(arguments.split()) == 2
    printed, complaint = capfd.readouterr()
    assert printed == ""
    assert refusal in complaint
    assert complaint.count("\n") == 1


def test_measure_prints_one_json_object_and_nothing_else(
    fake_lab: type[FakeLab], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", "phi-4-tiny", "--json"]) == 0
    printed, noise = capfd.readouterr()
    values = json.loads(printed)
    assert set(values) >= PROMISED_KEYS
    assert {name: type(values[name]) for name in PROMISED_KEYS if name.endswith("_bytes")} == {
        name: int for name in PROMISED_KEYS if name.endswith("_bytes")
    }
    assert all(type(num_bytes) is int for num_bytes in values["peak_by_category"].values())
    assert values == json.loads(json.dumps(record_of(training_step(), MemorySettings()).to_dict()))
    assert sorted(noise.splitlines()) == ["a step", "closing", "from C", "from below"]


def test_measure_prints_the_table_without_json(fake_lab: type[FakeLab], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "phi-4-tiny"]) == 0
    printed = capfd.readouterr().out
    assert "settings: none" in printed
    assert "from" not in printed.splitlines()[0]


def test_flags_reach_scenario_and_settings(fake_lab: type[FakeLab], monkeypatch: pytest.MonkeyPatch) -> None:
    # The flag sets this variable for the whole process, and this process has other tests to run.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    flags = (
        "measure qwen3-moe-tiny --num-layers 3 --seq-length 64 --micro-batch-size 2 --num-microbatches 4 --seed 7 "
        "--dtype fp32 --recompute-granularity selective --recompute-modules core_attn,layernorm --checkpoint-input-remedy detach "
        "--offload-modules expert_fc1,moe_act --min-offloaded-tensor-size 0 --offload-parameters --offload-optimizer "
        "--no-offload-gradients --grad-reduce-in-bf16 --attention-backend unfused --no-use-distributed-optimizer "
        "--expandable-segments --json"
    )
    assert main(flags.split()) == 0
    assert fake_lab.settings == MemorySettings(
        recompute_granularity="selective",
        recompute_modules=("core_attn", "layernorm"),
        checkpoint_input_remedy="detach",
        offload_modules=("expert_fc1", "moe_act"),
        min_offloaded_tensor_size=0,
        offload_parameters=True,
        offload_gradients=False,
        offload_optimizer=True,
    )
    scenario = Scenario.of(
        "qwen3-moe-tiny",
        num_layers=3,
        seq_length=64,
        micro_batch_size=2,
        num_microbatches=4,
        seed=7,
        dtype="fp32",
        state=TrainingState(grad_reduce_in_bf16=True, attention_backend="unfused", use_distributed_optimizer=False),
        allocator=AllocatorSettings(expandable_segments=True),
    )
    assert fake_lab.arguments == {"architecture": scenario, "backend": "auto"}


def test_every_memory_setting_and_every_option_of_the_training_state_has_a_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["measure", "--help"])
    printed = capsys.readouterr().out
    for field in (*fields(MemorySettings), *fields(TrainingState), *fields(AllocatorSettings)):
        flag = field.name.replace("_", "-")
        assert f"--no-{flag}" in printed if field.default is True else f"--{flag}" in printed


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error(unbuffered: str, tmp_path: Path) -> None:
    folder = str(record_of(training_step()).save(tmp_path / "record"))
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "memlab", "compare", folder, folder],  # it imports no torch
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("step", ["prepare", "job"])
def test_ctrl_c_ends_with_130_and_no_traceback(
    step: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    prepare = interrupt if step == "prepare" else lambda _: interrupt
    monkeypatch.setattr("memlab.commands.doctor.prepare", prepare)
    assert main(["doctor"]) == 130
    assert capfd.readouterr() == ("", "")


def test_measure_saves_a_record_once(
    fake_lab: type[FakeLab], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["measure", "phi-4-tiny", "--out", str(tmp_path / "record")]
    assert main(command) == 0
    assert StepRecord.load(tmp_path / "record").timeline is not None
    assert main(command) == 2
    assert "which is not empty: choose another folder or remove it" in capfd.readouterr().err


def test_measure_writes_a_snapshot_beside_the_record(fake_lab: type[FakeLab], tmp_path: Path) -> None:
    assert main(["measure", "phi-4-tiny", "--out", str(tmp_path / "record"), "--snapshot"]) == 0
    timeline = StepRecord.load(tmp_path / "record").timeline
    assert timeline is not None
    again = Timeline.from_snapshot(tmp_path / "record" / "snapshot.pickle")
    assert np.array_equal(again.total_bytes(), timeline.total_bytes())


def test_a_value_that_the_lab_refuses_is_one_line_and_not_taken_for_bad_input(
    fake_lab: type[FakeLab], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> StepRecord:
        raise ValueError("a rule of\nMegatron's")

    monkeypatch.setattr(fake_lab, "step", fail)
    assert main(["measure", "phi-4-tiny"]) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "a rule of\\nMegatron's"


def test_stdout_is_given_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), stdout_reserved_for_result():
        raise RuntimeError
    os.write(1, b"back\n")
    assert capfd.readouterr().out == "back\n"


def test_a_live_measurement_is_one_json_object(capfd: pytest.CaptureFixture[str]) -> None:
    flags = (
        "measure qwen3-moe-tiny --num-layers 2 --seq-length 32 --offload-modules moe_act --min-offloaded-tensor-size 0"
    )
    assert main([*flags.split(), "--json"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert set(values) >= PROMISED_KEYS
    assert values["offloaded_bytes_by_module"]["moe_act"] > 0
    assert values["load_seconds"] == values["offload_seconds"] == 0.0
    assert sum(values["peak_by_category"].values()) == values["peak_allocated_bytes"]


def test_a_folder_that_another_measure_writes_to_is_refused(
    fake_lab: type[FakeLab], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["measure", "phi-4-tiny", "--out", str(tmp_path / "same")]
    inner: list[int] = []
    step = fake_lab.step

    def step_while_another_starts(lab: FakeLab, settings: MemorySettings) -> StepRecord:
        monkeypatch.setattr(fake_lab, "step", step)
        inner.append(main(command))
        return step(lab, settings)

    monkeypatch.setattr(fake_lab, "step", step_while_another_starts)
    assert main(command) == 0
    assert inner == [2]
    assert "which another memlab command is writing to now: choose another folder" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "same").iterdir()) == ["record.json", "timeline.npz"]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_measure_that_fails_or_is_terminated_leaves_no_folder(
    error: type[BaseException], fake_lab: type[FakeLab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> StepRecord:
        if error is SystemExit:
            signal.raise_signal(signal.SIGTERM)
        raise RuntimeError

    monkeypatch.setattr(fake_lab, "step", fail)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error):
        main(["measure", "phi-4-tiny", "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_prediction_reads_no_variable_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert (
        main(["predict", "phi-4-tiny", "--num-layers", "1", "--seq-length", "32", "--out", str(tmp_path / "out")]) == 0
    )
    assert (tmp_path / "out" / "record.json").exists()


def test_a_disk_that_fills_up_under_out_is_one_line(
    fake_lab: type[FakeLab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill(path: Path, **_: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")  # a write names no file, as only opening one does

    monkeypatch.setattr(np, "savez_compressed", fill)
    assert main(["measure", "phi-4-tiny", "--out", str(tmp_path / "out")]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"{tmp_path / 'out'}: no space left on device: free space or choose another path"
    assert list(tmp_path.iterdir()) == []


def test_long_values_are_shortened_and_line_ends_escaped() -> None:
    line = one_line(f"name is 'a\nb {'x y ' * 400}', must be shorter; {'9' * 3000} \n")
    assert len(line) < 1000 and line.count("\n") == 0
    assert "name is 'a\\nb x y" in line and "(1607 characters)" in line and "(3000 characters)" in line
    assert one_line("a short value, 42: choose another") == "a short value, 42: choose another"


WITHOUT = """
import sys
from importlib import metadata

names, *arguments = sys.argv[1:]

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names.split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def not_installed(name):
    raise metadata.PackageNotFoundError(name)

sys.meta_path.insert(0, Missing())
if "nothing" in names:
    metadata.requires = metadata.version = not_installed
from memlab.cli import main
sys.exit(main(arguments))
"""


def run_without(names: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command where packages cannot be imported; after ``nothing``, none has an installation's metadata."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WITHOUT, names, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("names", ["numpy,torch,packaging", "nothing", "nothing,numpy,torch,packaging"])
def test_doctor_works_in_a_broken_installation(names: str) -> None:
    done = run_without(names, "doctor", "--json")
    assert (done.returncode, done.stderr) == (1, ""), done.stderr
    found = json.loads(done.stdout)
    assert not found["backends"]["cpu"]["ok"] and found["backends"]["cpu"]["remedy"]
    assert {"torch", "megatron-core", "numpy", "plotly"} <= found["packages"].keys()
    assert found["hardware"]["host memory"].endswith("iB")
    assert found["packages"]["memlab"]["ok"] == ("nothing" not in names)


def test_other_commands_send_a_broken_installation_to_the_doctor() -> None:
    done = run_without("numpy", "predict", "phi-4-tiny")
    assert (done.returncode, done.stderr) == (1, "numpy is not installed: memlab doctor says how to install it\n")


def test_doctor_names_the_hardware_and_versions_that_were_never_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.1" if name == "megatron-core" else installed(name))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.159.04'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(doctor, "host_memory_bytes", lambda: 6 * 1024**3)  # a container's limit
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["packages"]["megatron-core"]["note"] == "memlab was never run with it, only with 0.16, 0.18, 0.19"
    assert found["hardware"]["GPU 0"] == "NVIDIA H200, 143771 MiB"
    assert found["hardware"]["driver"] == "580.159.04"
    assert {"CUDA", "CPU"} <= found["hardware"].keys()
    assert found["hardware"]["host memory"] == "6.000 GiB"


def test_doctor_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    installed = metadata.version

    def version(name: str) -> str:
        if name == "plotly":
            raise metadata.PackageNotFoundError(name)
        return "0.12.0" if name == "megatron-core" else installed(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor", "--json"]) == 1, "no backend can be used"
    found = json.loads(capfd.readouterr().out)
    assert found["packages"]["torch"]["ok"]
    assert found["packages"]["plotly"] == {
        "ok": False,
        "version": None,
        "problem": "not installed",
        "remedy": "pip install -e '.[cpu]'",
        "note": None,
    }
    assert found["packages"]["megatron-core"]["version"] == "0.12.0"
    assert ">=0.16.1" in found["packages"]["megatron-core"]["problem"]
    assert "megatron-core is not" in found["backends"]["cpu"]["problem"]
    assert all(bool(backend["problem"]) == bool(backend["remedy"]) for backend in found["backends"].values())


def test_doctor_says_in_its_own_words_that_no_gpu_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(logger, "disabled", False)
    (tmp_path / "loud.py").write_text(f"import logging\nlogging.getLogger({logger.name!r}).warning('No CUDA runtime')")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._loading_problem("loud") == ""
    assert caplog.records == []


def test_doctor_finds_the_cpu_backend(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capfd.readouterr().out
    backends = printed[printed.index("backends") :]
    for name in ("cpu", "simulated"):
        assert any(line.split() == [name, "-", "ok"] for line in backends.splitlines())
    assert "cuda" in backends


def test_lab_opens_jupyterlab_on_the_labs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    started: list[list[str]] = []
    environments: list[dict[str, str]] = []

    def start(_: str, command: list[str], environment: dict[str, str]) -> None:
        started.append(command)
        environments.append(environment)

    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/given")
    main(["lab", "--", "--no-browser"])
    folder = Path(__file__).parents[2] / "labs"
    assert started == [[sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder}", "--no-browser"]]
    (environment,) = environments
    assert environment["JUPYTER_CONFIG_PATH"].startswith(f"/given{os.pathsep}")
    # As JupyterLab's server reads it (jupyterlab_server.settings_utils), and its schema says what there is to set.
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", environment["JUPYTER_CONFIG_PATH"])
    defaults = ConfigManager(config_dir_name="labconfig").get("default_setting_overrides")
    assert defaults["@jupyterlab/notebook-extension:tracker"] == {"codeCellConfig": {"lineWrap": True}}
    schema = Path(get_app_dir(), "schemas", "@jupyterlab", "notebook-extension", "tracker.json")
    known = json.loads(schema.read_text())["properties"]["codeCellConfig"]["default"]
    assert known["lineWrap"] is False, "without memlab's default, long lines are not wrapped"
