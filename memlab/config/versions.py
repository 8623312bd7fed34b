"""The versions of the libraries of a job, where they differ in bytes, and which of them memlab knows."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from memlab.config.from_json import build
from memlab.config.option import EngineName
from memlab.config.training_state import TrainingState
from memlab.config.validation import shortened

CrossEntropy = Literal["overwrites logits", "gradient in fp32", "copies logits"]
TITLES = {"transformer_engine": "Transformer Engine", "megatron_core": "megatron-core", "torch": "torch"}
MEASURED_TOGETHER = (
    ("2.12", "0.16", "2.11"),
    ("2.16", "0.16", "2.11"),
    ("2.16", "0.18", "2.11"),
    ("2.16", "0.19", "2.11"),
    ("2.20", "0.16", "2.11"),
)
"""Releases, in the order of `TITLES`, with which steps were measured on a GPU and compared with predictions
(labs/RESULTS.md)."""
MEASURED = {name: tuple(sorted(set(releases))) for name, *releases in zip(TITLES, *MEASURED_TOGETHER, strict=True)}
READ = {
    "transformer_engine": ("2.13", "2.14", "2.15", "2.17", "2.18", "2.19"),
    "megatron_core": ("0.17",),
    "torch": ("2.10", "2.12", "2.13", "2.14", "2.15"),
}
"""Releases of which only the code that decides about bytes was read."""
OLDER_FILES = {"transformer_engine": "2.12"}
"""What memlab predicted before a scenario had versions."""
_DIFFERENCES_OF_CORES = {
    frozenset({"0.16", "0.19"}): "49 steps with 0.19.2 peaked within 0.04 % of those with 0.16.1",
    frozenset({"0.16", "0.18"}): "15 jobs with 0.18.2 peaked within 0.02 % of those with 0.16.1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """The libraries of the machines where a job runs, whatever is installed where it is predicted.

    Each is a release such as ``2.16``; a third number is left out, since no patch release that was looked at changes
    bytes. A live lab on a GPU has the installed ones.

    Raises:
        ValueError: If a value is no version. Whether memlab knows it is asked only for a prediction (`require_known`).
    """

    transformer_engine: str = "2.16"
    """The newest release that was measured. Its layers, its Adam and what they keep are imitated without a GPU."""
    megatron_core: str | None = None
    """None is the installed one: a prediction runs its code, so another release is an approximation (`remarks`)."""
    torch: str = "2.11"
    """The release that was measured."""

    def __post_init__(self) -> None:
        for name in TITLES:
            value = getattr(self, name)
            if value is None and name == "megatron_core":
                continue
            found = re.match(r"([0-9]{1,3})[.]([0-9]{1,3})(?![0-9])", value) if isinstance(value, str) else None
            if found is None:
                raise ValueError(
                    f"{name} is {shortened(value)}, must be a version: give one such as {MEASURED[name][-1]}"
                )
            object.__setattr__(self, name, found[0])

    def require_known(self) -> None:
        """Checks that memlab can predict for these versions.

        Raises:
            ValueError: If it has never looked at one of them.
        """
        for name, title in TITLES.items():
            value, known = getattr(self, name), (*MEASURED[name], *READ[name])
            if value is not None and value not in known:
                choices = ", ".join(sorted(known, key=_numbers))
                raise ValueError(
                    f"{name} is {value}, must be one of {choices}, since memlab has not looked at what another "
                    f"{title} allocates: choose the nearest one, and expect another number of bytes"
                )

    @property
    def updates_bf16_moments_in_place(self) -> bool:
        """Whether Adam's kernel reads and writes two bf16 moments as they are stored.

        ``fuse_unscale`` in ``transformer_engine/pytorch/optimizers/fused_adam.py``, which is new in 2.13.0. Before, and
        for other types, fp32 copies of the moments of all parameters of a group live until the group is updated.
        """
        return _numbers(self.transformer_engine) >= (2, 13)

    @property
    def sees_fp8_within_checkpoints(self) -> bool:
        """Whether a linear in a checkpoint's first pass knows that it will be recomputed, if FP8 began inside.

        ``is_fp8_activation_recompute_enabled`` in ``transformer_engine/pytorch/distributed.py``, since 2.19.0. Such a
        linear quantizes its weight column-wise too, and full recompute holds these values from the first pass on.
        """
        return _numbers(self.transformer_engine) >= (2, 19)

    @property
    def holds_replaced_weights(self) -> bool:
        """Whether a cached FP8 weight that is replaced lives until the linear's forward pass has ended.

        ``weight_workspaces`` in ``transformer_engine/pytorch/module/grouped_linear.py``, since 2.15.0. Before,
        ``get_weight_workspace`` freed it before it made the new one.
        """
        return _numbers(self.transformer_engine) >= (2, 15)

    @property
    def keeps_tensorwise_scales(self) -> bool:
        """Whether each quantizer of the recipe ``tensorwise`` keeps a scale and an amax between steps.

        ``Float8CurrentScalingQuantizer`` in ``transformer_engine/pytorch/tensor/float8_tensor.py``, before 2.16.0.
        """
        return _numbers(self.transformer_engine) <= (2, 15)

    @property
    def cross_entropy(self) -> CrossEntropy:
        """What Transformer Engine's cross entropy keeps for backward (``transformer_engine/pytorch/cross_entropy.py``).

        Up to 2.17 it is the gradient, written over the logits. In 2.18 it is the gradient in fp32, beside the logits.
        Since 2.19 it is a copy of the logits, which backward overwrites, and two fp32 values of each token;
        ``overwrite_input`` would spare the copy, and Megatron up to 0.19 does not set it.
        """
        engine = _numbers(self.transformer_engine)
        if engine <= (2, 17):
            return "overwrites logits"
        return "copies logits" if engine >= (2, 19) else "gradient in fp32"

    @property
    def overwrites_gradients_of_scores(self) -> bool:
        """Whether the softmax of unfused attention writes the scores' gradient over that of the probabilities.

        ``scaled_masked_softmax_backward`` in ``csrc/extensions/softmax.cpp``; since 2.19.0 it makes a new tensor.
        """
        return _numbers(self.transformer_engine) <= (2, 18)

    @property
    def frees_quantized_gradients(self) -> bool:
        """Whether a column-parallel linear in FP8 frees its output's quantized gradient before its norm's backward.

        ``clear_tensor_data`` in ``module/layernorm_linear.py``, with sequence parallelism, since 2.18.0.
        """
        return _numbers(self.transformer_engine) >= (2, 18)

    @property
    def prepares_every_checkpoint(self) -> bool:
        """Whether linears prepare for a second pass of any checkpoint, also of one that autograd does not see.

        Since 2.20.0 only if autograd runs and a tensor among the checkpoint's arguments needs a gradient
        (``_CheckpointFunction`` in ``transformer_engine/pytorch/distributed.py``).
        """
        return _numbers(self.transformer_engine) <= (2, 19)

    @property
    def keeps_freed_gathers(self) -> bool:
        """Whether torch may keep what a coalesced collective has sent after the program has freed it.

        Fixed in torch 2.14 (https://github.com/pytorch/pytorch/pull/187433).
        """
        return _numbers(self.torch) < (2, 14)

    def checkpoints_hybrid_models(self, installed_core: tuple[int, ...]) -> bool:
        """Whether full recompute does anything in a model with layers of Mamba (``models/hybrid/hybrid_block.py``).

        ``mamba_block.py`` of 0.16.1 and 0.17.1 ignores it: a step of Nemotron-H 8B with 9 layers peaked as without it.

        Args:
            installed_core: The version that runs, if no other is meant.
        """
        meant = installed_core if self.megatron_core is None else _numbers(self.megatron_core)
        return meant >= (0, 18)

    def remarks(self, state: TrainingState, context_parallel_size: int, installed_core: str) -> list[str]:
        """Returns what a reader of a prediction should know of its versions: where they decide, or are not exact.

        Args:
            context_parallel_size: Ranks that share a sequence.
            installed_core: The version of megatron-core whose code was run.
        """
        lines = []
        if state.exp_avg_dtype == state.exp_avg_sq_dtype == "bf16" and not state.keeps_optimizer_on_host:
            copies = "makes fp32 copies of bf16 moments in each update, which raise the peak"
            lines.append(
                "the version of Transformer Engine decides what the update needs: Adam of 2.13 and later updates two "
                f"bf16 moments in place, Adam of 2.12 {copies}"
            )
        if state.cross_entropy_loss_fusion and state.cross_entropy_fusion_impl == "te":
            lines.append(
                "the version of Transformer Engine decides what its cross entropy keeps: 2.17 and earlier overwrite "
                "the logits with their gradient, 2.18 keeps a gradient in fp32 beside them, 2.19 and later a copy of "
                "them"
            )
        if state.attention_backend == "unfused":
            lines.append(
                "the version of Transformer Engine decides what unfused attention needs in backward: 2.19 and later "
                "make the scores' gradient beside that of the probabilities"
            )
        copies_gradients = _numbers(self.transformer_engine) >= (2, 19)
        if state.cuda_graph_impl == "transformer_engine" and copies_gradients:
            lines.append(
                "the graphs of layers are predicted as Transformer Engine up to 2.18 replays them: "
                f"{self.transformer_engine} returns copies of the gradients that a graph has for its parameters, and "
                "needs up to those of one graph more"
            )
        if state.reuse_grad_buf_for_mxfp8_param_ag:
            lines.append(
                "the version of megatron-core decides what is kept beside MXFP8 parameters: 0.16 keeps all others "
                f"twice, 0.19 keeps them once; {installed_core or 'the installed one'} made this prediction"
            )
        has_long_ring = context_parallel_size > 2 and state.cp_comm_type == "p2p"
        if has_long_ring and _numbers(self.transformer_engine) > (2, 19):
            lines.append(
                "the ring of context parallelism is predicted as Transformer Engine up to 2.19 has it, with a buffer "
                f"of keys and values for each rank: {self.transformer_engine} keeps two, and was measured on two ranks "
                "only"
            )
        for name, title in TITLES.items():
            if getattr(self, name) in READ[name] and name != "torch":
                lines.append(f"{title} {getattr(self, name)} was read, and no step with it was measured")
        if installed_core and self.megatron_core not in (None, release(installed_core)):
            difference = _DIFFERENCES_OF_CORES.get(
                frozenset({self.megatron_core, release(installed_core)}), "how far the two differ was not measured"
            )
            lines.append(
                f"the code of megatron-core {installed_core}, which is installed here, made this prediction for "
                f"{self.megatron_core}: {difference}"
            )
        return lines

    def remarks_of_fsdp2(self, installed_torch: str) -> list[str]:
        """Returns what a reader of a prediction of FSDP2 should know: it is the installed torch's code that was run.

        From 2.15 on, the gradient of a gathered parameter has the type of the reduction (``unsharded_grad_dtype`` in
        ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``); up to 2.14, only what several micro-batches add up has.
        And ``foreach_reduce`` (``_fsdp_collectives.py`` beside it) holds no gradient that it has copied. Up to 2.14, a
        loop's variable holds the unit's last one, such as the output layer's, until it returns.

        Args:
            installed_torch: Its version; empty where a record does not say it.
        """
        if not installed_torch:
            return []
        is_new, is_meant_new = (_numbers(each) >= (2, 15) for each in (release(installed_torch), self.torch))
        if is_new == is_meant_new:
            return []
        remark = (
            f"the code of torch {installed_torch}, which is installed here, made this prediction for torch "
            f"{self.torch}: from 2.15 on, FSDP2 keeps gradients in the type of their reduction, and frees a unit's "
            "last gradient before it reduces them; of 14 measured steps, 12 are predicted alike with both, one with "
            "accumulated micro-batches is 1.9 % higher with 2.15, and one that peaks where the gradients of embedding "
            "and output layer are reduced is 6.7 % lower"
        )
        return [remark]

    def words(self, engine: EngineName, installed_core: str = "") -> str:
        """Names the versions of what an engine runs, as ``Transformer Engine 2.16, megatron-core 0.16.1, torch 2.11``.

        Args:
            engine: FSDP2 runs none of Megatron-Core and Transformer Engine.
            installed_core: The version of megatron-core whose code was run; empty leaves it out.
        """
        named = asdict(self) | {"megatron_core": self.megatron_core or installed_core}
        titles = TITLES if engine == "megatron" else {"torch": TITLES["torch"]}
        return ", ".join(f"{title} {named[name]}" for name, title in titles.items() if named[name])

    def changed(self) -> dict[str, Any]:
        """Returns the fields that differ from the default."""
        default = Versions()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Versions:
        """Builds versions from what `dataclasses.asdict` returned.

        Raises:
            ValueError: If a field is unknown, or no version.
        """
        return build(cls, values, "versions")

    def __str__(self) -> str:
        """The versions that are not the default, such as ``Transformer Engine 2.12``."""
        return ", ".join(f"{TITLES[name]} {value}" for name, value in self.changed().items()) or "default versions"


def release(version: str) -> str:
    """Returns the first two numbers of a version, which are what memlab tells apart."""
    return ".".join(map(str, _numbers(version)))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(re.match(r"[0-9]*", minor)[0] or 0)  # type: ignore[index]  # matches anything
