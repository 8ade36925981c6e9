"""Two arms, two seeds each, paired by seed: what does a score of its own for every token with itself change?

So few steps of so small a model say nothing about language: the script shows how such a comparison is made.
"""

from pathlib import Path
from tempfile import mkdtemp

from qkform.training import Experiment, compare, run

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
folder = Path(mkdtemp())
for attention in ("standard", "decoupled"):
    for seed in (0, 1):
        experiment = Experiment(
            objective="mlm",
            attention=attention,
            seed=seed,
            config=SMALL,
            steps=12,
            warmup_steps=2,
            batch_size=8,
            seq_len=32,
            held_out=16,
            track_every=4,
            save_every=12,
        )
        finished = run(experiment, folder / f"{attention}-{seed}")
        print(
            f"{attention}, seed {seed}: held-out loss {finished.held_out:.3f} nats after {finished.step} steps"
        )

table = compare([folder])
print(f"baseline: {table.settings['baseline']}")
for row in table.means:
    if row["at"] == "end" and row["difference"] is not None:
        interval = "" if row["low"] is None else f" ({row['low']:+.2g} to {row['high']:+.2g})"
        print(f"{row['arm']}, {row['measure']}: {row['difference']:+.2g}{interval} over {row['n']} seeds")
