"""Adapters against PEFT's on transformers' own models: loss, and the gradients of both matrices, with the same weights.

    python -m benchmarks.against_peft

Needs peft (0.19.1) with accelerate, and transformers (5.24), which memlab itself does not. A tiny member of each dense
family takes the weights of both, in fp32 on the CPU backend. PEFT has an adapter for each of q_proj, k_proj, v_proj,
o_proj, gate_proj, up_proj and down_proj, which is Megatron-Bridge's canonical form.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.against_transformers import TOKENS, megatron_weights, transformers_config
from memlab import Lab, LoRA, TrainingState
from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.lora import CANONICAL
from tests.unit.inside import inside

RANK, ALPHA = 8, 24
PLACES = {
    "self_attn.q_proj": "self_attention.linear_qkv.adapter.adapter_q",
    "self_attn.k_proj": "self_attention.linear_qkv.adapter.adapter_k",
    "self_attn.v_proj": "self_attention.linear_qkv.adapter.adapter_v",
    "self_attn.o_proj": "self_attention.linear_proj.adapter",
    "mlp.gate_proj": "mlp.linear_fc1.adapter.adapter_gate",
    "mlp.up_proj": "mlp.linear_fc1.adapter.adapter_up",
    "mlp.down_proj": "mlp.linear_fc2.adapter",
}
"""Of PEFT's adapters in a layer, those of Megatron's."""
MATRICES = {"lora_A.default": "linear_in", "lora_B.default": "linear_out"}


def largest_differences(model: Architecture) -> tuple[float, float]:
    """Returns the difference between both losses, and the largest one of a gradient over the largest gradient."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(transformers_config(model), dtype=torch.float32)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    weights = megatron_weights({name: value.clone() for name, value in base.state_dict().items()}, model)
    targets = [name.rpartition(".")[2] for name in PLACES]
    theirs = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    adapters = {name: value for name, value in theirs.named_parameters() if value.requires_grad}
    for parameter in adapters.values():
        torch.nn.init.normal_(parameter.data, std=0.1)
    tokens = torch.randint(model.vocab_size, (1, TOKENS + 1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), labels)
    expected.backward()
    names = {
        f"base_model.model.model.layers.{layer}.{place}.{matrix}.weight": f"decoder.layers.{layer}.{own}.{part}.weight"
        for layer in range(model.num_layers)
        for place, own in PLACES.items()
        for matrix, part in MATRICES.items()
    }
    assert names.keys() == adapters.keys(), "PEFT has an adapter on each linear of each layer"
    state = TrainingState(lora=LoRA(rank=RANK, alpha=ALPHA, target_modules=CANONICAL))
    with Lab(model, backend="cpu", dtype="fp32", seq_length=TOKENS, state=state) as lab:
        one = inside(lab).model
        ours = one.engine.live.chunk.module
        own = dict(ours.named_parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                if not parameter.requires_grad:
                    parameter.copy_(weights[name.replace(".to_wrap", "")])
            for name, its_own in names.items():
                own[its_own].copy_(adapters[name])
        with one.backend.active():
            logits = ours(inputs, torch.arange(TOKENS).unsqueeze(0), None)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
            grads = torch.autograd.grad(loss, [own[name] for name in names.values()])
    largest = max(float(parameter.grad.abs().max()) for parameter in adapters.values() if parameter.grad is not None)
    difference = max(float((grad - adapters[name].grad).abs().max()) for name, grad in zip(names, grads, strict=True))
    return abs(loss.item() - expected.item()), difference / largest


def main() -> None:
    """Prints a line for each family."""
    for name in ("llama-3-tiny", "qwen3-dense-tiny", "qwen2.5-tiny"):
        of_loss, of_gradients = largest_differences(ARCHITECTURES[name])
        print(f"{name}: losses differ by {of_loss:.1e}, gradients by at most {of_gradients:.1e} of the largest")


if __name__ == "__main__":
    main()
