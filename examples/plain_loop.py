"""A loop of your own: a symmetric start, a score of its own for every token with itself, and a record of the form.

The task needs attention: sequences count upwards from a random number, and the model fills in masked tokens.
"""

from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

import qkform as qk
from qkform.dynamics import Tracker

VOCABULARY, LENGTH, STEPS = 24, 12, 90
MASK = VOCABULARY
torch.manual_seed(0)


def batch(size=32):
    tokens = (torch.randint(0, VOCABULARY, (size, 1)) + torch.arange(LENGTH)) % VOCABULARY  # (B, T)
    hidden = torch.rand(tokens.shape) < 0.2
    return {"input_ids": tokens.masked_fill(hidden, MASK), "labels": tokens.masked_fill(~hidden, -100)}


config = ModernBertConfig(
    vocab_size=VOCABULARY + 1,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    global_attn_every_n_layers=1,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    cls_token_id=None,
    sep_token_id=None,
)
model = ModernBertForMaskedLM(config)
qk.surgery.symmetrize_(model, arm="matched", seed=0)  # W is symmetric at step 0 and free afterwards
qk.surgery.decouple_(model, init="diagonal")  # x W x^T of a token with itself becomes x diag(v) x^T
optimizer = torch.optim.AdamW(qk.surgery.param_groups(model, lr=5e-3, qk_lr_ratio=2.0, weight_decay=0.01))

path = Path(mkdtemp()) / "record.jsonl"
with Tracker(model, every=30, path=path, probe=batch()) as tracker:
    tracker.step(0, optimizer=optimizer)
    for step in range(1, STEPS + 1):
        inputs = batch()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tracker.step(step, loss=loss, optimizer=optimizer, batch=inputs)

record = qk.RunRecord.load(path)
steps, losses = record.series("loss")
for place, layer in enumerate(record.layers):
    _, symmetry = record.series("symmetry", layer=place)
    print(
        layer["module"],
        " ".join(f"{step}: {value:+.3f}" for step, value in zip(steps, symmetry, strict=True)),
    )
print(f"loss {losses[1]:.3f} at step {steps[1]}, {losses[-1]:.3f} at step {steps[-1]}; the record is {path}")
