"""Recipe functions of a Megatron-Bridge on disk: read as data, from a package with the layout of the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.jobs.bridge_package import Recipe, package_around
from memlab.jobs.entries import UNKNOWN, NoJobError
from memlab.jobs.job import Job
from memlab.jobs.survey import survey
from tests.unit.job_files import read_job

FILES = {
    "__init__.py": "from megatron.bridge.models.conversion.auto_bridge import AutoBridge\n",
    "models/conversion/auto_bridge.py": (
        "class AutoBridge:\n    @classmethod\n    def from_hf_pretrained(cls, path, **kwargs):\n        import torch\n"
    ),
    "training/config.py": (
        "from dataclasses import dataclass\n"
        "@dataclass\nclass TokenizerConfig:\n    tokenizer_type: str = None\n    vocab_size: int = None\n    use_tokenizer_vocab_size: bool = False\n"
        "@dataclass\nclass ConfigContainer:\n    model: object = None\n    train: object = None\n    mixed_precision: object = None\n"
        "@dataclass\nclass TrainingConfig:\n    micro_batch_size: int = None\n    global_batch_size: int = None\n"
    ),
    "training/mixed_precision.py": (
        "from dataclasses import dataclass\n"
        "@dataclass\nclass MixedPrecisionConfig:\n    bf16: bool = False\n    grad_reduce_in_fp32: bool = True\n"
        "def register(function):\n    return function\n"
        "@register\ndef bf16_mixed():\n    cfg = MixedPrecisionConfig()\n    cfg.bf16 = True\n    return cfg\n"
        "def get_mixed_precision_config(config):\n    return registry[config]()\n"
    ),
    "recipes/__init__.py": "from megatron.bridge.recipes.llama import *\n",
    "recipes/common.py": (
        "from megatron.core.distributed import DistributedDataParallelConfig\n"
        "from megatron.bridge.training.config import ConfigContainer, TokenizerConfig, TrainingConfig\n"
        "def _pretrain_common():\n"
        "    cfg = ConfigContainer(train=TrainingConfig(micro_batch_size=2, global_batch_size=32), mixed_precision='bf16_mixed')\n"
        "    cfg.ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)\n"
        "    cfg.tokenizer = TokenizerConfig(use_tokenizer_vocab_size=True)\n"
        "    return cfg\n"
    ),
    "recipes/llama/__init__.py": (
        "from .h100.llama3 import llama32_1b_pretrain_4gpu_h100_bf16_config as llama32_1b_pretrain_config\n"
        "__all__ = ['llama32_1b_pretrain_config']\n"
    ),
    "recipes/llama/h100/__init__.py": "from .llama3 import *\n",
    "recipes/llama/h100/llama3.py": (
        "import os\nfrom megatron.bridge import AutoBridge\nfrom megatron.bridge.recipes.common import _pretrain_common\n"
        "from megatron.bridge.training.mixed_precision import bf16_mixed, get_mixed_precision_config\n"
        "def llama32_1b_pretrain_4gpu_h100_bf16_config():\n"
        "    cfg = _pretrain_common()\n"
        "    cfg.model = AutoBridge.from_hf_pretrained('meta-llama/Llama-3.2-1B').to_megatron_provider(load_weights=False)\n"
        "    cfg.model.seq_length = 4096\n"
        "    cfg.model.tensor_model_parallel_size = 2\n"
        "    cfg.model.sequence_parallel = cfg.model.num_layers == 16 and cfg.model.num_moe_experts is not None\n"
        "    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = 'NullTokenizer', 32000\n"
        "    return cfg\n"
        "def llama32_1b_sft_1gpu_h100_bf16_config():\n"
        "    cfg = llama32_1b_pretrain_4gpu_h100_bf16_config()\n"
        "    cfg.mixed_precision = get_mixed_precision_config('bf16-mixed')\n"
        "    cfg.mixed_precision.grad_reduce_in_fp32 = False\n"
        "    cfg.model.tensor_model_parallel_size = 1\n"
        "    cfg.tokenizer.use_tokenizer_vocab_size = False\n"
        "    cfg.train.global_batch_size = 4\n"
        "    return cfg\n"
        "def llama32_1b_of_this_machine_config():\n"
        "    cfg = _pretrain_common()\n"
        "    if os.environ.get('BIG'):\n        cfg.train.micro_batch_size = 4\n"
        "    return cfg\n"
        "def llama32_1b_qkv_config():\n"
        "    cfg = llama32_1b_sft_1gpu_h100_bf16_config()\n"
        "    cfg.model.num_layers, cfg.model.ffn_hidden_size, cfg.model.recompute_granularity = 4, 1024, os.environ.get('HOW')\n"
        "    return cfg\n"
    ),
    "perf_recipes/__init__.py": "",
    "perf_recipes/llama/__init__.py": "from .h100.llama3 import *\n",
    "perf_recipes/llama/h100/llama3.py": (
        "from megatron.bridge.recipes.llama import llama32_1b_pretrain_config\n"
        "def llama32_1b_pretrain_4gpu_h100_bf16_config():\n"
        "    cfg = llama32_1b_pretrain_config()\n    cfg.train.micro_batch_size = 1\n    return cfg\n"
    ),
}  # fmt: skip
LLAMA = "src/megatron/bridge/recipes/llama/h100/llama3.py"

OF_OLMOE = {
    "models/olmoe/olmoe_provider.py": "class OlMoEModelProvider:\n    num_layers: int = 16\n",
    "recipes/olmoe/h100/olmoe.py": (
        "from megatron.bridge.models.olmoe.olmoe_provider import OlMoEModelProvider\n"
        "from megatron.bridge.recipes.common import _pretrain_common\n"
        "def olmoe_pretrain_8gpu_h100_bf16_config():\n    cfg = _pretrain_common()\n    cfg.tokenizer.vocab_size = 50304\n"
        "    cfg.model = OlMoEModelProvider(expert_model_parallel_size=8, seq_length=4096)\n    return cfg\n"
    ),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "src/megatron/bridge" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_recipe_is_what_its_functions_set(checkout: Path) -> None:
    job = Job.read(checkout / f"{LLAMA}::llama32_1b_pretrain_4gpu_h100_bf16_config")
    scenario, _ = job.required()
    layout = scenario.layout
    assert (layout.world_size, layout.tensor_model_parallel_size, layout.sequence_parallel) == (4, 2, False)
    assert (scenario.seq_length, scenario.micro_batch_size, scenario.num_microbatches) == (4096, 2, 8)
    # 32,000 tokens, padded to a multiple of 128 x 2: what the tokenizer replaces in the published model's 128,256.
    assert scenario.architecture.vocab_size == 32_000
    assert (scenario.state.overlap_grad_reduce, scenario.state.grad_reduce_in_bf16) == (True, False)
    assert (job.not_modelled, job.guesses, job.questions) == ((), (), ())
    places = {one.key: one.place for one in job.taken}
    assert places["model.seq_length"] == "line 8"
    assert places["train.micro_batch_size"] == "line 4 of common.py"


def test_a_recipe_that_keeps_its_model_s_vocabulary_has_the_published_one(checkout: Path) -> None:
    scenario, _ = Job.read(checkout / f"{LLAMA}::llama32_1b_sft_1gpu_h100_bf16_config").required()
    assert (scenario.architecture.vocab_size, scenario.layout.world_size) == (128_256, 1)
    assert scenario.state.grad_reduce_in_bf16, "the precision is an object that the recipe changes"


def test_a_recipe_replaces_sizes_of_the_model_that_it_names(checkout: Path) -> None:
    job = Job.read(checkout / f"{LLAMA}::llama32_1b_qkv_config")
    scenario, _ = job.required()
    assert (scenario.num_layers, scenario.architecture.ffn_hidden_size, scenario.architecture.hidden_size) == (
        4,
        1024,
        2048,
    )
    assert any("recompute_granularity is known only when the job runs" in line for line in job.warnings)


@pytest.mark.parametrize(
    ("words", "micro_batch_size", "ranks"),
    [
        ("--recipe llama32_1b_pretrain_config", 2, 4),
        ("--recipe llama32_1b_pretrain_4gpu_h100_bf16_config", 1, 4),
        ("--recipe llama32_1b_pretrain_config -mb 4", 4, 4),
        ("--model llama32_1b --mode pretrain", 2, 4),
    ],
)
@pytest.mark.parametrize("torchrun", ["", "torchrun --nproc_per_node=8 "])
def test_a_command_in_the_checkout_takes_the_checkout_s_recipe(
    torchrun: str, words: str, micro_batch_size: int, ranks: int, checkout: Path
) -> None:
    """A performance recipe of the same name counts, and the ranks of the launcher."""
    (checkout / "examples").mkdir()
    job = read_job(f"{torchrun}scripts/training/run_recipe.py {words}\n", checkout, "examples/run.sh")
    scenario, _ = job.required()
    assert (scenario.micro_batch_size, scenario.layout.world_size) == (micro_batch_size, 8 if torchrun else ranks)
    assert {one.value for one in job.taken if one.field == "world_size"} == (set() if torchrun else {ranks})


def test_what_a_recipe_sets_inside_of_defaults_and_of_unknown_objects_counts(checkout: Path) -> None:
    (checkout / "src/megatron/bridge/recipes/llama/h100/other.py").write_text(
        "import os\nfrom dataclasses import dataclass, field\n"
        "from megatron.core.distributed import DistributedDataParallelConfig\n"
        "@dataclass\nclass Train:\n    names: list = field(default_factory=lambda: ['a'])\n    rows: list = field(default_factory=list)\n"
        "@dataclass\nclass Container:\n    model: object = None\n    train: Train = field(default_factory=Train)\n"
        "    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)\n"
        "def other_config():\n"
        "    cfg = Container(model=os.environ.get('MODEL'))\n"
        "    cfg.model.tensor_model_parallel_size = 8\n"
        "    cfg.model.pipeline_model_parallel_layout = [['embedding', 'decoder'], ['decoder'] * 2 + ['mtp', 'loss']]\n"
        "    cfg.ddp.bucket_size = 7\n"
        "    cfg.train.names.append('b')\n"
        "    return cfg\n"
    )
    package = package_around(checkout / LLAMA)
    assert package is not None
    entries = package.entries_of(Recipe("megatron.bridge.recipes.llama.h100.other", "other_config")).by_key
    assert {key: one.value for key, one in entries.items()} == {
        "model": UNKNOWN,
        "model.tensor_model_parallel_size": 8,
        "model.pipeline_model_parallel_layout": "Et|ttmL",
        "ddp.bucket_size": 7,
        "train.names": ["a", "b"],
    }


def test_a_recipe_that_depends_on_the_machine_is_refused_by_its_line(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"without running it: line 23 of .*: it depends on os\.environ\.get\('BIG'\)"):
        Job.read(checkout / f"{LLAMA}::llama32_1b_of_this_machine_config")
    job = read_job("scripts/training/run_recipe.py --recipe llama32_1b_of_this_machine_config -tp 1\n", checkout)
    assert any("line 23 of" in line for line in job.warnings)
    assert job.guesses[-1] == "what the recipe 'llama32_1b_of_this_machine_config' sets"


@pytest.mark.parametrize("name", [LLAMA, f"{LLAMA}::absent_config", "src/megatron/bridge/recipes/common.py::x"])
def test_a_file_without_the_name_of_its_recipe_is_asked_for_it(name: str, checkout: Path) -> None:
    with pytest.raises(NoJobError, match=r"is no recipe of \w+\.py: give FILE\.py::RECIPE"):
        Job.read(checkout / name)


def test_a_recipe_that_was_edited_is_read_again(checkout: Path) -> None:
    jobs = [read_job("scripts/training/run_recipe.py --recipe llama32_1b_pretrain_config\n", checkout)]
    for name, old, new in ((LLAMA, "'NullTokenizer', 32000", "'NullTokenizer', 640000"),
                           ("src/megatron/bridge/recipes/llama/__init__.py", "pretrain_4gpu", "sft_1gpu")):  # fmt: skip
        path = checkout / name
        path.write_text(path.read_text().replace(old, new))
        jobs.append(Job.read(checkout / "run.sh"))
    scenarios = [job.required()[0] for job in jobs]
    assert [one.architecture.vocab_size for one in scenarios] == [32_000, 640_000, 128_256]
    assert [one.layout.world_size for one in scenarios] == [4, 4, 1]


def test_what_a_recipe_cannot_take_is_refused(checkout: Path) -> None:
    path = checkout / f"{LLAMA}::llama32_1b_sft_1gpu_h100_bf16_config"
    with pytest.raises(ValueError, match="is no script that could be started with values: leave out what follows --"):
        Job.read(path, arguments=["--tp", "2"])
    with pytest.raises(
        ValueError, match=r"the format is 'verl', but llama3\.py::\w+ is a recipe of 'bridge': leave it out"
    ):
        Job.read(path, format_name="verl")


def test_a_survey_counts_each_recipe_as_a_job(checkout: Path) -> None:
    found = survey(checkout)
    outcomes = {one.path.rpartition("::")[2]: one.outcome for one in found.files if "/recipes/" in one.path}
    assert outcomes == {
        "llama32_1b_pretrain_4gpu_h100_bf16_config": "expressible",
        "llama32_1b_sft_1gpu_h100_bf16_config": "expressible",
        "llama32_1b_qkv_config": "unbounded",
    }
    assert [name.rpartition("::")[2] for name in found.unreadable] == ["llama32_1b_of_this_machine_config"]
    assert sum("perf_recipes" in one.path for one in found.files) == 1


@pytest.mark.parametrize("folder", [".", "../llama", "h100"])
def test_a_survey_from_inside_the_recipes_counts_them_too(
    folder: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout / LLAMA.rpartition("/h100/")[0])
    found = survey(Path(folder))
    assert (len(found.files), len(found.unreadable)) == (3, 1)


def test_nothing_outside_the_package_is_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/llama.py").write_text("def llama_config():\n    return 1\n")
    assert package_around(tmp_path / "recipes/llama.py") is None
    assert survey(tmp_path).files == ()


def test_the_class_of_a_single_model_names_it(checkout: Path) -> None:
    for path, text in OF_OLMOE.items():
        file = checkout / "src/megatron/bridge" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    job = Job.read(f"{checkout}/src/megatron/bridge/recipes/olmoe/h100/olmoe.py::olmoe_pretrain_8gpu_h100_bf16_config")
    scenario, _ = job.required()
    assert scenario.architecture.name == "olmoe-1b-7b"
    assert scenario.layout.expert_model_parallel_size == 8
    assert scenario.state.moe_router_load_balancing_type == "seq_aux_loss"


def test_the_class_of_models_of_any_sizes_decides_what_layers_consist_of(checkout: Path) -> None:
    files = {
        "models/gpt_provider.py": "class GPTModelProvider:\n    num_layers: int = None\n",
        "recipes/gpt/h100/gpt3.py": (
            "from megatron.bridge.models.gpt_provider import GPTModelProvider\n"
            "from megatron.bridge.recipes.common import _pretrain_common\n"
            "def gpt3_pretrain_1gpu_h100_bf16_config():\n    cfg = _pretrain_common()\n"
            "    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = 'NullTokenizer', 50250\n"
            "    cfg.model = GPTModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=512)\n    return cfg\n"
        ),
    }
    for name, text in files.items():
        path = checkout / "src/megatron/bridge" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    recipe = "src/megatron/bridge/recipes/gpt/h100/gpt3.py::gpt3_pretrain_1gpu_h100_bf16_config"
    model = Job.read(checkout / recipe).required()[0].architecture
    assert (model.normalization, model.gated_linear_unit, model.add_bias_linear) == ("LayerNorm", False, True)
    assert (model.position_embedding_type, model.max_position_embeddings) == ("learned_absolute", 512)
    assert (model.share_embeddings_and_output_weights, model.vocab_size) == (True, 50304)
    path = checkout / recipe.partition("::")[0]
    path.write_text(path.read_text().replace("GPTModelProvider", "WanModelProvider"))
    (checkout / "src/megatron/bridge/models/gpt_provider.py").write_text(
        "class WanModelProvider:\n    num_layers: int = None\n"
    )
    job = Job.read(checkout / recipe)
    assert job.scenario is None and "model.class WanModelProvider" in str(job.not_supported)
