"""transformers' own Trainer with the tracker as a callback: nothing else of a training script changes."""

from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

import qkform as qk
from qkform.dynamics import Tracker

VOCABULARY, LENGTH = 32, 16
set_seed(0)


def sentences(count, seed):
    """Counting from a random number in steps of one: the next token follows from the one before."""
    first = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (first + torch.arange(LENGTH)) % VOCABULARY  # (count, T)
    return [{"input_ids": row, "labels": row} for row in tokens]


model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
)
folder = Path(mkdtemp())
tracker = Tracker(
    every=10, path=folder / "record.jsonl"
)  # the model and the held-out batch come from the Trainer
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=str(folder),
        max_steps=40,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=sentences(320, seed=1),
    eval_dataset=sentences(32, seed=2),
    callbacks=[tracker],
)
trainer.remove_callback(PrinterCallback)  # the numbers are in the record
trainer.train()

record = qk.RunRecord.load(folder)
steps, held_out = record.series("held_out")
_, symmetry = record.series("symmetry", layer=0)
_, entropy = record.series("normalised_entropy", layer=0)
print("step  held-out loss  symmetry of layer 0  normalised entropy")
for row in zip(steps, held_out, symmetry, entropy, strict=True):
    print("{:4d}  {:13.3f}  {:+19.3f}  {:18.3f}".format(*row))
