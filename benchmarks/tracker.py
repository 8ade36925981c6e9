"""What tracking costs: the tracker's own time over the time of training, in one run of a small model.

    python benchmarks/tracker.py --save benchmarks/results

ModernBERT for masked language modelling, 4 layers, width 128, vocabulary 512, batches of 64 x 64, AdamW, on the CPU;
a line every 100 steps on a probe of 64 x 64 tokens: the preset `tiny`, and as long as it is. The first line costs more
than the others, since the attentions of the model are found there; so a shorter run has a larger share. Exits with 1
where the share is above 1 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from machine import machine
from qkform.dynamics import Tracker
from qkform.runs import RunRecord

VOCABULARY, SEQUENCES, TOKENS = 512, 64, 64
TARGET = 0.01


def model() -> Any:
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=TOKENS,
        global_attn_every_n_layers=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return ModernBertForMaskedLM(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > 0.3, -100)
    return {"input_ids": ids.masked_fill(labels >= 0, 3), "labels": labels}


def run(every: int, steps: int, *, conflict: int | bool) -> RunRecord:
    """One training, recorded."""
    net = model().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        with Tracker(net, every=every, path=path, probe=batch(10**6), conflict=conflict) as tracker:
            tracker.step(0, optimizer=optimizer)
            for step in range(1, steps + 1):
                given = batch(step)
                loss = net(**given).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.step(step, loss=loss, optimizer=optimizer, batch=given)
        return RunRecord.load(path)


def shares(record: RunRecord) -> dict[str, float]:
    """Own time over all time: of the whole run, and from each line to the next, on average."""
    (_, seconds), (_, own) = record.series("seconds"), record.series("tracker_seconds")
    lines = len(seconds) - 1
    return {
        "steps": record.steps[-1]["step"],
        "seconds": seconds[-1],
        "tracker_seconds": own[-1],
        "share": own[-1] / seconds[-1],
        "share_after_step_0": (own[-1] - own[0]) / (seconds[-1] - seconds[0]),
        "first_line": own[0],
        "seconds_per_line": (own[-1] - own[0]) / lines,
        "tokens_per_second": record.steps[-1]["tokens"] / (seconds[-1] - seconds[0]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--conflict", type=int, default=0, help="permutations; 0 leaves conflict out")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    found = shares(run(args.every, args.steps, conflict=args.conflict or False))
    at = machine() | {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    lines = [
        f"{at['cpu']}, {at['threads']} threads, torch {at['torch']}",
        f"ModernBERT, 4 layers, width 128, batches of {SEQUENCES} x {TOKENS}; a line every {args.every} steps"
        + (f", conflict with {args.conflict} permutations" if args.conflict else ""),
        f"{found['steps']} steps in {found['seconds']:.1f} s, {found['tokens_per_second']:.0f} tokens/s",
        f"the tracker's own time {found['tracker_seconds']:.2f} s, {100 * found['share']:.2f} % of all",
        f"{found['first_line']:.2f} s of it at step 0, where the model is found; "
        f"after that {found['seconds_per_line']:.2f} s a line, {100 * found['share_after_step_0']:.2f} %",
        f"target: at most {100 * TARGET:.0f} %: {'met' if found['share'] <= TARGET else 'missed'}",
    ]
    print("\n".join(lines))
    if args.save:
        (args.save / "tracker.txt").write_text("\n".join(lines) + "\n")
        said = {"machine": at, "every": args.every, "conflict": args.conflict, **found}
        (args.save / "tracker.json").write_text(json.dumps(said, indent=1) + "\n")
    return 0 if found["share"] <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
