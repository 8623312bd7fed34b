#!/usr/bin/env bash
# transformers 5.24.0: with reentrant checkpoints the auxiliary loss of a mixture of experts trains nothing. The loss reads
# the router's logits that a hook has noted in each layer's forward pass. `use_reentrant=True` runs that pass without a
# graph, so the logits need no gradient; the loss has the same value as without checkpoints, is added to the model's
# loss, and changes no weight. With `use_reentrant=False`, which is transformers' default now, it works.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, a Qwen3-MoE with output_router_logits=True; the part of the router's
# gradient that is due to the auxiliary loss (the gradient with a coefficient of 1 less that with 0), as a norm:
#   no checkpoints: auxiliary loss 2.09, needs a gradient; of the routers' gradient 1.24
#   gradient_checkpointing_enable(): auxiliary loss 2.09, needs a gradient; of the routers' gradient 1.24
#   use_reentrant=False: auxiliary loss 2.09, needs a gradient; of the routers' gradient 1.24
#   use_reentrant=True: auxiliary loss 2.09, needs none; of the routers' gradient 0.00
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/router.py" <<'PY'
import torch
import transformers

ids = torch.arange(16)[None]


def gradients(coefficient, checkpoints):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=100, num_experts=8, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=coefficient,
    )
    model = transformers.Qwen3MoeForCausalLM(config).train()
    if checkpoints is not None:
        model.gradient_checkpointing_enable(**checkpoints)
        model.enable_input_require_grads()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    routers = [parameter.grad for name, parameter in model.named_parameters() if name.endswith("gate.weight")]
    return torch.cat(routers), output.aux_loss


def show(name, checkpoints):
    with_loss, loss = gradients(1.0, checkpoints)
    without, _ = gradients(0.0, checkpoints)
    needs = "a gradient" if loss.requires_grad else "none"
    print(f"{name}: auxiliary loss {loss:.2f}, needs {needs}; of the routers' gradient {(with_loss - without).norm():.2f}")


show("no checkpoints", None)
show("gradient_checkpointing_enable()", {})
for reentrant in (False, True):
    show(f"use_reentrant={reentrant}", {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}})
PY
"$folder/venv/bin/python" "$folder/router.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
