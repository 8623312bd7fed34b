"""Every bad command line ends in exit code 2 and one line, before torch is imported, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memlab.cli import main
from memlab.config.architectures import ARCHITECTURES

ROOT = Path(__file__).parents[2]
LONG = "x" * 5000
NINES = "9" * 4200
DEEP = "[" * 100_000 + "]" * 100_000

PHI: dict[str, Any] = {
    "model_type": "phi3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
MOE: dict[str, Any] = PHI | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}

# Files that the commands below name as {NAME}: text, or what is written as JSON.
FILES: dict[str, Any] = {
    "empty.json": "",
    "deep.json": DEEP,
    "binary.json": b"\xff\xfe\x00\x01",
    "list.json": [],
    "null.json": None,
    "number.json": 7,
    "nan.json": "NaN",
    "broken.json": '{"model_type": "phi3",',
    "other_family.json": PHI | {"model_type": "gemma3"},
    "no_layers.json": {name: value for name, value in PHI.items() if name != "num_hidden_layers"},
    "text_layers.json": PHI | {"num_hidden_layers": "two"},
    "true_layers.json": PHI | {"num_hidden_layers": True},
    "no_hidden.json": PHI | {"hidden_size": None},
    "list_hidden.json": PHI | {"hidden_size": [64]},
    "text_eps.json": PHI | {"rms_norm_eps": "small"},
    "list_eps.json": PHI | {"rms_norm_eps": []},
    "null_eps.json": PHI | {"rms_norm_eps": None},
    "negative_eps.json": PHI | {"rms_norm_eps": -1},
    "list_rope.json": PHI | {"rope_theta": None, "rope_parameters": [1]},
    "huge_rope.json": json.dumps(PHI).replace("10000.0", "1" + "0" * 400),
    "negative_rope.json": PHI | {"rope_theta": -1},
    "text_factor.json": PHI | {"partial_rotary_factor": "half"},
    "large_factor.json": PHI | {"partial_rotary_factor": 5},
    "text_tie.json": PHI | {"tie_word_embeddings": "false"},
    "no_experts.json": MOE | {"num_experts": None},
    "text_norm.json": MOE | {"norm_topk_prob": "no"},
    "zero_head_dim.json": MOE | {"head_dim": 0},
    "odd_head_dim.json": MOE | {"head_dim": 33},
    "text_aux.json": MOE | {"router_aux_loss_coef": "a little"},
    "infinite_aux.json": json.dumps(MOE | {"router_aux_loss_coef": float("inf")}),
    "more_topk.json": MOE | {"num_experts_per_tok": 9},
    "huge_vocab.json": PHI | {"vocab_size": 10**18},
    "absurd_vocab.json": PHI | {"vocab_size": 10**40},
    "huge_hidden.json": PHI | {"hidden_size": 10**15},
    "huge_layers.json": PHI | {"num_hidden_layers": 10**30},
    "million_layers.json": PHI | {"num_hidden_layers": 10**6},
    "huge_experts.json": MOE | {"num_experts": 10**12},
    "short.routing": [0.5, 0.5],
    "text.routing": ["all"] * 8,
    "deep.routing": DEEP,
    "object.routing": {"shares": [0.125] * 8},
    "negative.routing": [-0.5, 1.5, 0, 0, 0, 0, 0, 0],
    "nan.routing": "[NaN, 1, 0, 0, 0, 0, 0, 0]",
    "empty.routing": [],
    "results.jsonl": '{"record": {}}\n',
    "list.jsonl": "[]\n",
    "deep.jsonl": DEEP + "\n",
    "zero.jsonl": '{"record": [], "seconds": 0}\n',
    "empty.jsonl": "",
    "binary.jsonl": b"\xff\xfe\n",
    "list_record/record.json": [],
    "null_record/record.json": None,
    "deep_record/record.json": DEEP,
    "empty_record/record.json": "",
    "scenario_record/record.json": {"scenario": []},
    "ranks/rank-0/record.json": {},
    "is_full/note.txt": "mine",
    "page.html": "mine",
    "suite.yaml": "- a list\n",
    "deep.yaml": DEEP,
    "list.ipynb": [],
    "null.ipynb": None,
    "broken.ipynb": "{",
    "deep.ipynb": DEEP,
}

LAYOUTS = ("tensor-model", "context", "pipeline-model", "virtual-pipeline-model", "expert-model", "expert-tensor")
NUMBERS = ("num-layers", "seq-length", "micro-batch-size", "num-microbatches")


def _lines() -> Iterator[str]:  # noqa: C901, PLR0915  # a table
    tiny, moe, room = "predict phi-4-tiny", "predict qwen3-moe-tiny", "search phi-4-tiny --gpu-memory 80GiB"
    # The command itself.
    yield from (
        "",
        "mesure",
        "--json",
        "predict",
        "search phi-4-tiny",
        "compare",
        "results",
        "run",
        "nightly",
        "baseline",
    )
    yield from (
        "baseline refresh",
        "baseline update",
        f"{LONG}",
        f"predict {LONG}",
        "doctor now",
        "doctor --yaml",
        "lab now --fast",
    )
    yield from (
        f"{tiny} --seq-len 8",
        f"{tiny} --{LONG} 1",
        f"{tiny} extra words",
        f"{tiny} --backend cpu",
        "measure phi-4-tiny --rank 0",
    )
    # Numbers and choices.
    for flag in NUMBERS:
        yield from (f"{tiny} --{flag} {value}" for value in ("0", "-1", "1.5", "x", "1e3", NINES, "9" * 5000))
    yield from (f"{tiny} --{flag}" for flag in NUMBERS)
    yield from (f"{tiny} --seed {value}" for value in ("-1", "x", str(2**63), NINES))
    yield from (f"{tiny} --dtype {value}" for value in ("fp8", "BF16", LONG, "''"))
    yield from (
        f"{tiny} --gpu-memory {value}"
        for value in ("80", "80gib", "-80GiB", "''", "nan", "9" * 400, NINES + "GiB", "1GiB", "80GiB80")
    )
    yield from (f"{room} --resolution {value}" for value in ("0", "-1B", "9" * 400, "x"))
    yield from (f"{room} --max-steps {value}" for value in ("0", "-1", "x", "1.5"))
    yield from (
        f"{room} --alone {others}" for others in ("--gpus 8", "--largest tokens", "--largest tokens --along-front", "5")
    )
    yield from (f"{tiny} --rank {value}" for value in ("1", "-1", "every", "1.0", NINES))
    # Settings and their conflicts.
    yield from (f"{tiny} --recompute-granularity {value}" for value in ("some", "full", LONG))
    yield f"{tiny} --recompute-method uniform"
    yield f"{tiny} --recompute-granularity full --recompute-method uniform"
    yield f"{tiny} --recompute-granularity full --recompute-method half --recompute-num-layers 1"
    yield from (
        f"{tiny} --recompute-granularity full --recompute-method uniform --recompute-num-layers {n}"
        for n in ("0", "3", "5", NINES)
    )
    yield from (
        f"{tiny} --recompute-granularity selective --recompute-modules {value}" for value in ("moe", "x", "mlp,", LONG)
    )
    yield from (f"{tiny} --offload-modules {value}" for value in ("attn_proj", "moe_act", "x,y", ",", LONG))
    yield f"{tiny} --recompute-modules mlp"
    yield f"{moe} --offload-modules moe_act --recompute-granularity selective --recompute-modules moe"
    yield from (f"{tiny} --min-offloaded-tensor-size {value}" for value in ("-1", "1.5", "all"))
    yield from (f"{tiny} --activation-offload-fraction {value}" for value in ("1.5", "-1", "nan", "half"))
    for flag in ("delta-offload-bytes-across-pp-ranks", "fine-grained-offloading-max-inflight-offloads"):
        yield from (f"{tiny} --{flag} {value}" for value in ("-1", "1.5", "all", NINES))
    for flag in ("ddp-bucket-size", "loss logprobs --logprobs-chunk-size"):
        yield from (f"{tiny} --{flag} {value}" for value in ("0", "-1", "1.5", "x", NINES))
    for flag in ("fp8-format", "fp8-recipe", "loss", "attention-backend", "exp-avg-dtype", "main-params-dtype"):
        yield from (f"{tiny} --{flag} {value}" for value in ("''", "FP32", LONG))
    for value in ("1.5", "-0.1", "nan", "1e-3", NINES):
        yield f"{tiny} --optimizer-cpu-offload --optimizer-offload-fraction {value}"
    yield from (f"{tiny} --garbage-collection-threshold {value}" for value in ("0", "1", "-0.5", "inf", NINES))
    yield from (f"{tiny} --max-split-size-mb {value}" for value in ("19", "-1", "32.5", NINES))
    yield from (f"{tiny} --{words}" for words in ("exp-avg-dtype bf16", "fp8-param-gather", "logprobs-chunk-size 8"))
    yield f"{tiny} --fp8-format e4m3 --seq-length 100"
    yield from (f"{tiny} --checkpoint-input-remedy {value}" for value in ("drop", LONG))
    yield from (
        f"{tiny} --snapshot",
        f"{tiny} --expert-buffers",
        "measure phi-4-tiny --snapshot",
        "measure phi-4-tiny --backend tpu",
    )
    # Ranks that are started here.
    yield from (f"measure phi-4-tiny --ranks {value}" for value in ("0", "-1", "x", "1.5", "1025", "''", NINES))
    yield from (
        "measure phi-4-tiny --ranks 2 --tensor-model-parallel-size 4",
        "measure phi-4-tiny --ranks 3 --pipeline-model-parallel-size 2",
        "measure phi-4-tiny --ranks 2 --expert-model-parallel-size 2",
        "measure phi-4-tiny --ranks 2 --backend simulated",
        "measure phi-4-tiny --ranks 2 --snapshot",
        "measure phi-4-tiny --ranks 2 --out {is_full}",
        "predict phi-4-tiny --ranks 2",
    )
    # Layouts and sizes.
    for flag in LAYOUTS:
        yield from (f"{tiny} --{flag}-parallel-size {value}" for value in ("0", "-2", "3", "x", NINES))
    yield from (f"{tiny} --world-size {value}" for value in ("0", "-1", "x", "1000000000", str(10**20), NINES))
    yield f"{moe} --world-size 1000000000 --expert-model-parallel-size 3"
    yield f"{moe} --world-size {10**20} --expert-model-parallel-size 3"
    yield f"{tiny} --num-layers 1000000000 --world-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 3"
    yield f"{tiny} --world-size 4 --pipeline-model-parallel-size 2 --num-layers-in-first-pipeline-stage 4"
    yield f"{tiny} --num-layers-in-last-pipeline-stage 1"
    yield from (f"{tiny} --seq-length {value}" for value in ("1000000000", "1000000000000000", str(2**62)))
    yield from (f"{tiny} --micro-batch-size {value}" for value in ("1000000000", str(2**62)))
    yield from (f"{tiny} --num-microbatches {value}" for value in ("100000", str(10**18)))
    yield from (
        f"{command} --num-layers {value}"
        for command in (tiny, room, "measure phi-4-tiny")
        for value in ("1000000", str(10**18))
    )
    # Routing.
    yield from (
        f"{moe} --routing {value}"
        for value in (
            "",
            "uneven",
            "random:",
            "random:x",
            "skewed:0",
            "skewed:9",
            "skewed:nan",
            "skewed:inf",
            "random:1.5",
            LONG,
            "/",
            "/proc/self/mem",
        )
    )
    yield from (f"{moe} --routing {{{name}}}" for name in FILES if name.endswith(".routing"))
    yield f"{tiny} --routing random:1"
    # Architectures.
    yield from (
        f"predict {name}"
        for name in (
            "phi",
            "/",
            "/dev/null",
            "/proc/self/mem",
            "'phi-4\ntiny'",
            "''",
            "{is_full}",
            "{page.html}/x",
            "{list.json}/",
        )
    )
    yield from (f"predict {{{name}}}" for name in FILES if name.endswith(".json") and "/" not in name)
    # Where to write.
    for command in ("predict phi-4-tiny", "measure phi-4-tiny --backend cpu"):
        yield from (
            f"{command} --out {value}"
            for value in ("''", "{is_full}", "{page.html}", "{page.html}/sub", "/proc/memlab", "/dev/null", LONG)
        )
    for command in (room, "compare {list_record} {list_record}", "results {results.jsonl}"):
        yield from (
            f"{command} --out {value}"
            for value in (
                "''",
                "{page.html}",
                "{is_full}",
                "{page.html}/x.html",
                "/proc/x.html",
                "/nowhere/x.html",
                "/dev/null",
                f"{LONG}.html",
            )
        )
    yield f"{room} --out page.txt"
    # Records, results, notebooks, suites.
    yield from (
        f"compare {{{name}}} {{{name}}}"
        for name in (
            "list_record",
            "null_record",
            "deep_record",
            "empty_record",
            "scenario_record",
            "ranks",
            "is_full",
            "page.html",
        )
    )
    yield from (
        "compare {list_record}",
        "compare none none",
        f"compare {LONG} {LONG}",
        "compare 'a\nb' 'a\nb'",
        "compare /dev/null /dev/null",
        "compare '' ''",
    )
    yield from (
        "predict phi-4-tiny -- 2 8",
        "search phi-4-tiny --gpu-memory 79GiB --",
        "job {suite.yaml} -- 2",
        "recipes",
        "recipes none",
        "recipes {suite.yaml}",
        "recipes . --framework-version 1",
        "recipes . -- 2",
        "published --only no_such_job",
        "published .",
        "predict --job {suite.yaml} --gpu-memory 79GiB -- 2",
        "job -- 2 8",
        "job none.sh -- 2 8",
    )
    yield from (f"results {{{name}}}" for name in FILES if name.endswith(".jsonl"))
    yield from (
        f"results labs/results/h200_settings.jsonl --steps {{{name}}}" for name in ("list.jsonl", "binary.jsonl")
    )
    yield from ("results none.jsonl", "results /", f"results {LONG}", "results labs/results/h200_steps.jsonl")
    yield from (
        "run none.ipynb",
        f"run {LONG}",
        "run labs",
        "run labs/00_quickstart.ipynb -p seq_length",
        "run labs/00_quickstart.ipynb -p x 1",
    )
    for command in ("run labs/00_quickstart.ipynb", "nightly papermill_runs/suites/cpu.yaml"):
        yield from (
            f"{command} --out {value}"
            for value in ("''", "{page.html}", "{page.html}/x/y", "/dev/null", "/proc/runs", LONG, "{loop}", "{loop}/x")
        )
    yield from (f"nightly {name}" for name in ("none.yaml", "{suite.yaml}", "labs", LONG))
    yield from (f"baseline update {name}" for name in ("none.yaml", "{suite.yaml}", LONG))

    for command in (room, "nightly papermill_runs/suites/cpu.yaml"):
        yield from (
            f"{command} --engines={value}" for value in ("-1", "1025", "''", "a/b", "..", "'a b'", "-", NINES, LONG)
        )
    yield "nightly papermill_runs/suites/cpu.yaml --engines 2 --jobs 2"


LINES = list(dict.fromkeys(_lines()))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "loop").symlink_to(folder / "loop")
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {f"{{{name}}}": path for name, path in names.items()}


def _words(line: str, files: dict[str, Path]) -> list[str]:
    for name, path in files.items():
        line = line.replace(name, str(path))
    return shlex.split(line)


@pytest.mark.parametrize("line", LINES, ids=[line[:90].encode("unicode_escape").decode() for line in LINES])
def test_a_bad_command_line_ends_in_one_line_and_exit_code_2(
    line: str, files: dict[str, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    before = {path: path.lstat().st_mtime_ns for path in files["{is_full}"].parent.rglob("*")}
    code = main(_words(line, files))
    printed, complaint = capfd.readouterr()
    assert (code, printed) == (2, ""), complaint
    assert complaint.endswith("\n") and complaint.count("\n") == 1 and 10 < len(complaint) <= 1000
    assert "Traceback" not in complaint
    assert {path: path.stat().st_mtime_ns for path in files["{is_full}"].parent.rglob("*") if path.is_file()} == {
        path: time for path, time in before.items() if path.is_file()
    }, "nothing that existed is touched"


RANK_0 = {"WORLD_SIZE": "2", "RANK": "0", "MEMLAB_BACKEND": "cpu"}
MEETING = RANK_0 | {"MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("variables", "line", "words"),
    [
        ({"WORLD_SIZE": "two"}, "measure phi-4-tiny", "the environment variable WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "measure phi-4-tiny", "the environment variable WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": ""}, "measure phi-4-tiny", "the environment variable WORLD_SIZE is ''"),
        ({"WORLD_SIZE": "9" * 30}, "measure phi-4-tiny", "the environment variable WORLD_SIZE is '999"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "measure phi-4-tiny", "the environment variable RANK is 2, must be below"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "measure phi-4-tiny", "the environment variable RANK is '-1'"),
        ({"RANK": "first"}, "measure phi-4-tiny", "the environment variable RANK is 'first'"),
        ({"RANK": "1"}, "measure phi-4-tiny", "RANK is 1, must be below WORLD_SIZE, 1 where it is not set"),
        ({"WORLD_SIZE": "2"}, "measure phi-4-tiny", "the environment variable RANK is not set beside WORLD_SIZE, 2"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "measure phi-4-tiny", "RANK is not set beside WORLD_SIZE, 2"),
        (RANK_0, "measure phi-4-tiny --num-layers 1", "MASTER_ADDR is not set beside WORLD_SIZE, 2"),
        (RANK_0 | {"MASTER_ADDR": "localhost"}, "measure phi-4-tiny --num-layers 1", "MASTER_PORT is not set beside"),
        (MEETING | {"MASTER_PORT": "port"}, "measure phi-4-tiny --num-layers 1", "MASTER_PORT is 'port', must be a"),
        (MEETING | {"MASTER_PORT": "65536"}, "measure phi-4-tiny --num-layers 1", "is 65536, must be at most 65535"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "measure phi-4-tiny --ranks 2", "torchrun has started 2 ranks"),
        ({"MEMLAB_BACKEND": "simulated"}, "measure phi-4-tiny --ranks 2", "memlab predict --world-size 2"),
        ({"MEMLAB_BACKEND": "x"}, "measure phi-4-tiny", "the environment variable MEMLAB_BACKEND is 'x'"),
        ({"MEMLAB_BACKEND": "\n"}, "measure phi-4-tiny", "the environment variable MEMLAB_BACKEND is '\\n'"),
    ],
)
def test_a_bad_environment_variable_is_named(
    variables: dict[str, str],
    line: str,
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(line.split()) == 2
    complaint = capfd.readouterr().err
    assert words in complaint and complaint.count("\n") == 1


def test_a_refusal_imports_no_torch(files: dict[str, Path]) -> None:
    lines = [
        "predict phi-4-tiny --seq-length 1000000000",
        "measure phi-4-tiny --backend tpu",
        "measure phi-4-tiny --ranks 3 --tensor-model-parallel-size 2",
        "measure phi-4-tiny --out {is_full}",
        "search phi-4-tiny --gpu-memory 80GiB --out {page.html}",
        "compare {list_record} {list_record}",
        "results {results.jsonl}",
        "run none.ipynb",
        "nightly {suite.yaml}",
        "search phi-4-tiny --gpu-memory 80GiB --engines a/b",
        "nightly papermill_runs/suites/cpu.yaml --engines 2 --jobs 2",
    ]
    # One process for all lines: what one of them imports would be there after the others, too, and fail the test.
    code = (
        "import json, sys; from memlab.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    code = main(words)\n"
        "    print(code, *(name in sys.modules for name in ('torch', 'megatron', 'ipyparallel')), flush=True)"
    )
    command = [sys.executable, "-c", code, json.dumps([_words(line, files) for line in lines])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    answers = dict(zip(lines, done.stdout.splitlines(), strict=True))
    assert answers == dict.fromkeys(lines, "2 False False False"), done.stderr
    assert done.stderr.count("\n") == len(lines)


@pytest.mark.parametrize("command", ["compare none none", "predict phi-4-tiny", "run none.ipynb", "nightly none.yaml"])
def test_an_empty_out_is_refused_and_is_not_the_current_folder(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), "--out", ""]) == 2
    assert "argument --out: the path is empty, must name a file or folder" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_table_is_long_and_names_every_command() -> None:
    assert len(LINES) > 200
    first = {line.split(" ")[0] for line in LINES}
    assert first >= {
        "measure",
        "predict",
        "search",
        "recipes",
        "published",
        "compare",
        "results",
        "run",
        "nightly",
        "baseline",
        "doctor",
        "lab",
    }
    assert ARCHITECTURES.keys() >= {"phi-4-tiny", "qwen3-moe-tiny"}
