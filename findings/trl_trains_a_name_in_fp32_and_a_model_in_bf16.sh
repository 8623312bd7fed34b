#!/usr/bin/env bash
# TRL 1.16.0, transformers 5.24.0: the same bf16 checkpoint with the same `bf16=True` needs 8 or 16 bytes a parameter for
# weights, gradients and Adam's state, and nothing is said. `from_pretrained` takes the checkpoint's type since
# transformers 5, so Trainer, and SFTTrainer if it is given that model, train bf16 weights with bf16 moments, without an
# fp32 copy. SFTTrainer and DPOTrainer that are given the name load it in fp32, and `bf16=True` is then autocast. DPO's
# reference model is loaded like the policy: 4 bytes a parameter or 2.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, AdamW, on a CPU, after a step; bytes a parameter:
#   Trainer(model): weights torch.bfloat16, 2.0, gradients 2.0, state 4.0, reference 0.0
#   SFTTrainer(model): weights torch.bfloat16, 2.0, gradients 2.0, state 4.0, reference 0.0
#   SFTTrainer(name): weights torch.float32, 4.0, gradients 4.0, state 8.0, reference 0.0
#   DPOTrainer(model): weights torch.bfloat16, 2.0, gradients 2.0, state 4.0, reference 2.0
#   DPOTrainer(name): weights torch.float32, 4.0, gradients 4.0, state 8.0, reference 4.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 trl==1.16.0 datasets==5.2.0 accelerate==1.15.0 numpy
cat > "$folder/bytes_of_trainers.py" <<'PY'
import logging
import sys
from contextlib import redirect_stdout
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers
import trl

logging.disable(logging.WARNING)
folder = Path(sys.argv[1])
name = str(folder / "model")
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<pad>": 2, "<eos>": 3}, unk_token="b"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
    bos_token_id=3, eos_token_id=3, pad_token_id=2,
)
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(name)
COMMON = {
    "output_dir": str(folder / "out"), "use_cpu": True, "bf16": True, "max_steps": 1, "report_to": [], "save_strategy": "no",
    "disable_tqdm": True, "optim": "adamw_torch", "gradient_checkpointing": False, "logging_strategy": "no",
}
TOKENS = [{"input_ids": [0, 1, 0], "labels": [0, 1, 0]}] * 8
PAIRS = [{"prompt": "a b", "chosen": " a", "rejected": " b"}] * 8


class Gradients(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.bytes = sum(parameter.grad.nbytes for parameter in model.parameters())


def show(title, make):
    seen = Gradients()
    with redirect_stdout(sys.stderr):
        trainer = make()
        trainer.add_callback(seen)
        trainer.train()
    count = trainer.model.num_parameters()
    moments = trainer.optimizer.state_dict()["state"].values()
    state = sum(value.nbytes for each in moments for name, value in each.items() if name != "step")
    reference = getattr(trainer, "ref_model", None)
    of_reference = 0 if reference is None else sum(parameter.nbytes for parameter in reference.parameters())
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    print(
        f"{title}: weights {trainer.model.dtype}, {weights / count:.1f}, gradients {seen.bytes / count:.1f}, "
        f"state {state / count:.1f}, reference {of_reference / count:.1f}"
    )


def loaded():
    return transformers.AutoModelForCausalLM.from_pretrained(name)


def tuned(kind, options, rows):
    rows = datasets.Dataset.from_list(rows)
    return lambda model: kind(model, args=options(**COMMON), train_dataset=rows, processing_class=tokenizer)


sft, dpo = tuned(trl.SFTTrainer, trl.SFTConfig, TOKENS), tuned(trl.DPOTrainer, trl.DPOConfig, PAIRS)
arguments = transformers.TrainingArguments(**COMMON)
show("Trainer(model)", lambda: transformers.Trainer(loaded(), arguments, train_dataset=TOKENS))
show("SFTTrainer(model)", lambda: sft(loaded()))
show("SFTTrainer(name)", lambda: sft(name))
show("DPOTrainer(model)", lambda: dpo(loaded()))
show("DPOTrainer(name)", lambda: dpo(name))
PY
"$folder/venv/bin/python" "$folder/bytes_of_trainers.py" "$folder" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
