"""A prediction is for the versions of the job's machines, which it names; what memlab does not know it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest

from memlab.backends import cuda
from memlab.cli import build_parser, main
from memlab.commands import doctor
from memlab.commands.shared.asked_step import asked_step
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.config.versions import MEASURED, READ, TITLES, Versions
from memlab.jobs.frameworks.registry import FRAMEWORKS
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.views.text.record import record_table
from tests.unit.builders import record_of
from tests.unit.job_files import read_job

pytestmark = pytest.mark.versions

BF16_MOMENTS = TrainingState(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
DECIDES = "the version of Transformer Engine decides"


def test_a_version_is_its_release() -> None:
    for text in ("2.16", "2.16.1", "2.16.0+42b8400", "2.16.0.dev0"):
        assert Versions(transformer_engine=text) == Versions(transformer_engine="2.16")
    assert Versions(torch="2.11.0+cu130").torch == "2.11"
    assert Versions.from_dict(asdict(Versions(megatron_core="0.19.2"))).megatron_core == "0.19"


@pytest.mark.parametrize("value", ["2", "new", "", "v2.16", "2.x", 2.16, None, "1234.1", "2.1234"])
def test_what_is_no_version_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"transformer_engine is .*, must be a version: give one such as 2\.20$"):
        Versions(transformer_engine=value)  # type: ignore[arg-type]


def test_the_defaults_were_measured() -> None:
    usual = Versions()
    assert all(getattr(usual, name) in (*MEASURED[name], None) for name in TITLES)
    assert all(not set(MEASURED[name]) & set(READ[name]) for name in TITLES)
    for pinned in FRAMEWORKS.values():
        Versions(transformer_engine=pinned.transformer_engine).require_known()


@pytest.mark.parametrize(
    ("flag", "value"), [("transformer-engine", "2.11"), ("transformer-engine", "2.21"), ("torch", "3.0")]
)
def test_a_version_that_memlab_never_looked_at_is_refused_in_a_prediction(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "phi-4-tiny", f"--{flag}", value]) == 2
    error = capsys.readouterr().err
    name = flag.replace("-", "_")
    assert re.fullmatch(rf".*{name} is {value}, must be one of .*: choose the nearest one, and [^\n]*\n", error)
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Lab("phi-4-tiny", versions=Versions(**{name: value}), backend="simulated")


def test_a_prediction_names_its_versions_and_says_where_they_decide() -> None:
    def table(versions: Versions, state: TrainingState) -> str:
        with Lab("phi-4-tiny", num_layers=1, seq_length=16, state=state, versions=versions, backend="simulated") as lab:
            return " ".join(record_table(lab.step()).split())

    core = metadata.version("megatron-core")
    usual = table(Versions(), TrainingState())
    assert f"versions: Transformer Engine 2.16, megatron-core {core}, torch 2.11" in usual
    assert DECIDES not in usual and "was read" not in usual and "installed here" not in usual
    read = table(Versions(transformer_engine="2.14"), BF16_MOMENTS)
    assert "Transformer Engine 2.14 was read, and no step with it was measured" in read
    assert DECIDES in read
    assert DECIDES not in table(Versions(), replace(BF16_MOMENTS, exp_avg_dtype="fp32"))
    newer = Versions(transformer_engine="2.20")
    ring = newer.remarks(TrainingState(), 4, core)
    assert len(ring) == 1 and "2.20 keeps two, and was measured on two ranks only" in ring[0]
    assert newer.remarks(TrainingState(), 2, core) == [], "two ranks have two buffers with either"
    assert newer.remarks(TrainingState(cp_comm_type="a2a"), 4, core) == [], "heads go around in no ring"
    assert Versions().remarks(TrainingState(), 4, core) == []
    before = Versions(transformer_engine="2.19").remarks(TrainingState(), 4, core)
    assert before == ["Transformer Engine 2.19 was read, and no step with it was measured"], "the ring changed in 2.20"
    graphs = TrainingState(cuda_graph_impl="transformer_engine")
    assert "those of one graph more" in newer.remarks(graphs, 1, core)[0]
    assert Versions(transformer_engine="2.18").remarks(graphs, 1, core)[0].endswith("no step with it was measured")
    other = "0.19" if core.startswith("0.16") else "0.16"
    assert f"the code of megatron-core {core}, which is installed here" in table(
        Versions(megatron_core=other), TrainingState()
    )


def test_a_prediction_of_fsdp2_says_whose_code_was_run_where_gradients_have_another_type() -> None:
    assert Versions().remarks_of_fsdp2("2.13.0+cpu") == Versions(torch="2.15").remarks_of_fsdp2("2.15.0") == []
    assert Versions().remarks_of_fsdp2("") == [], "an old record"
    newer, older = Versions().remarks_of_fsdp2("2.15.0"), Versions(torch="2.15").remarks_of_fsdp2("2.14.0")
    assert newer[0].startswith("the code of torch 2.15.0, which is installed here, made this prediction for torch 2.11")
    assert older[0].startswith("the code of torch 2.14.0, which is installed here, made this prediction for torch 2.15")


def test_flags_reach_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "phi-4-tiny", "--num-layers", "1", "--seq-length", "16", "--json"]
    assert main([*words, "--transformer-engine", "2.12.0", "--torch", "2.13"]) == 0
    record = json.loads(capsys.readouterr().out)
    versions = record["scenario"]["versions"]
    assert versions == {"transformer_engine": "2.12", "megatron_core": None, "torch": "2.13"}
    assert record["versions"]["transformer-engine"] == "2.12 (predicted)", "whatever is installed"


def test_files_of_an_older_memlab_are_of_the_version_that_measured_them() -> None:
    record = record_of(None)
    values = json.loads(json.dumps(record.to_dict()))
    assert StepRecord.from_dict(values) == record
    del values["scenario"]["versions"]
    for installed, expected in (
        ({"transformer-engine": "2.16.1"}, "2.16"),
        ({"transformer-engine": "2.12.0"}, "2.12"),
        ({"transformer-engine": "not installed"}, "2.12"),
        ({}, "2.12"),
    ):
        read = StepRecord.from_dict(values | {"versions": installed})
        assert read.scenario.versions == Versions(transformer_engine=expected)
    assert Scenario.from_dict(values["scenario"]).versions.transformer_engine == "2.12"


def test_torch_2_14_keeps_no_freed_gathers() -> None:
    kept = {}
    for torch_version in ("2.13", "2.14"):
        with Lab(
            "qwen3-moe-tiny",
            num_layers=2,
            seq_length=256,
            layout=Layout(tensor_model_parallel_size=2),
            state=TrainingState(fp8_format="e4m3", fp8_recipe="blockwise"),
            versions=Versions(torch=torch_version),
            backend="simulated",
        ) as lab:
            kept[torch_version] = lab.step().kept_gather_bytes
    assert kept["2.13"] > 0 == kept["2.14"]


def test_a_lab_on_a_gpu_has_the_installed_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformer-engine": "2.18.1", "megatron-core": "0.16.1"}
    monkeypatch.setattr(cuda.metadata, "version", installed.__getitem__)
    found = cuda.installed_versions(Versions())
    assert (found.transformer_engine, found.megatron_core) == ("2.18", "0.16")
    assert cuda.installed_versions(found) == found
    with pytest.raises(ValueError, match=r"transformer_engine 2\.12, must be what is installed here"):
        cuda.installed_versions(Versions(transformer_engine="2.12"))


def test_a_job_has_the_version_that_its_framework_installs(tmp_path: Path) -> None:
    job = read_job("torchrun pretrain_gpt.py --num-layers 2\n", tmp_path, architecture="phi-4-tiny")
    assert job.scenario is not None and job.scenario.versions == Versions()
    assert FRAMEWORKS["nemo-rl"].transformer_engine == "2.15"


def test_a_measured_step_of_a_job_has_the_installed_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "grpo.yaml"
    script.write_text(
        "policy: {model_name: Qwen/Qwen3-0.6B, max_total_sequence_length: 512, train_global_batch_size: 1,\n"
        "  train_micro_batch_size: 1, megatron_cfg: {enabled: true}}\ncluster: {num_nodes: 1, gpus_per_node: 1}\n"
    )
    arguments = ["--job", str(script), "--num-layers", "1"]
    asked = {}
    for command, ranks in (("predict", None), ("measure", 1)):
        asked[command] = asked_step(build_parser().parse_args([command, *arguments]), measured_ranks=ranks)
    assert asked["predict"].scenario.versions.transformer_engine == "2.15"
    assert asked["measure"].scenario.versions == Versions()
    assert "the job has Transformer Engine 2.15, a measured step what is installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "core", "is_measured"),
    [("2.16.1", "0.19.2", True), ("2.12.0", "0.19.2", False), (None, "0.16.1", False)],
)
def test_doctor_asks_whether_the_versions_were_measured_together(
    engine: str | None, core: str, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"transformer-engine": engine, "megatron-core": core, "torch": "2.11.0"}
    monkeypatch.setattr(doctor, "_installed", installed.get)
    assert doctor._is_measured() == is_measured
    assert ("no step was measured with what" in doctor._versions_line()) != is_measured


@pytest.mark.parametrize("symbol", ["cublasLtGroupedMatrixLayoutInit_internal", "_ZN3c105ErrorE"])
def test_a_transformer_engine_that_asks_for_a_newer_cublas_is_told_how_to_get_it(
    symbol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> None:
        raise OSError(f"libtransformer_engine.so: undefined symbol: {symbol}, version libcublasLt.so.13")

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(cuda, "_is_too_late", lambda name, value: False)
    monkeypatch.setattr(cuda, "import_module", fails)
    found = cuda.check_available()
    assert found is not None and symbol in found.problem and "take the version that memlab pins" in found.remedy
    assert ("nvidia-cublas==13.4.0.1" in found.remedy) == symbol.startswith("cublasLt")
