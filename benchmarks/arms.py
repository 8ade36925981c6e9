"""The numbers about the arms of a symmetric start in docs/surgery.md and surgery/arms.py: python benchmarks/arms.py

* of each arm, in a new BERT of width 64, 256 and 768: how many times the norm of W (a layer, the sum over its heads) is
  that of the model's own start, and the symmetry; the mean over `LAYERS` layers;
* of the control under rotary embedding, d_model 512, d_head 64, frequencies of base 10000, Gaussian W_Q: the root mean
  square and the largest symmetry at a distance, of one head and of the sum of eight.
"""

from __future__ import annotations

import torch
from transformers import BertConfig, BertModel

import qkform as qk
from qkform.form import BilinearForm
from qkform.form.rotary import Rotary
from qkform.surgery.arms import ARMS, planes, random
from qkform.surgery.rebuilt import REBUILT

LAYERS = 2
WIDTHS = (64, 256, 768)
DISTANCES = (0, 1, 4, 16)
D_MODEL, D_HEAD = 512, 64


def bert(width: int) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(width // 64, 4),
        intermediate_size=8,
    )
    return BertModel(config)


def of_arm(arm: str, width: int) -> tuple[float, float]:
    """Norm over that of before, and symmetry, of a layer: means over the layers."""
    starts = qk.surgery.symmetrize_(bert(width), arm=arm, seed=0)
    norms = [start.norm / start.norm_before for start in starts]
    return sum(norms) / len(norms), sum(start.symmetry for start in starts) / len(starts)


def at_distance(heads: int, draws: int) -> dict[int, tuple[float, float]]:
    """Root mean square and largest size of the control's symmetry, by distance."""
    rotary = Rotary("half", tuple(10000 ** (-2 * i / D_HEAD) for i in range(D_HEAD // 2)))
    where, generator = planes(D_HEAD, rotary), torch.Generator().manual_seed(0)
    found: dict[int, list[float]] = {n: [] for n in DISTANCES}
    for _ in range(draws):
        w_q = torch.randn(heads, D_MODEL, D_HEAD, generator=generator)
        j = torch.stack([random(where, head, generator) for head in range(heads)]).float()
        w_k = w_q @ j
        for n in DISTANCES:
            form = BilinearForm(torch.as_tensor(rotary.turned(w_q.numpy(), n)), w_k)
            found[n].append(float(form.total().symmetry()[0]))
    drawn = {n: torch.tensor(values) for n, values in found.items()}
    return {n: (float(x.square().mean().sqrt()), float(x.abs().max())) for n, x in drawn.items()}


def main() -> None:
    print("norm of W over that of before, and symmetry, by width of a BERT")
    print(f"{'arm':14}" + "".join(f"{width:>18}" for width in WIDTHS))
    for arm in (*ARMS, *REBUILT):
        cells = [of_arm(arm, width) for width in WIDTHS]
        print(f"{arm:14}" + "".join(f"{norm:10.3f}  {sym:6.3f}" for norm, sym in cells), flush=True)
    for heads, draws in ((1, 200), (8, 60)):
        print(f"control under rotary embedding, {heads} heads, {draws} draws: rms and largest symmetry")
        for n, (rms, largest) in at_distance(heads, draws).items():
            print(f"  distance {n:2}: {rms:.3f}  {largest:.3f}")


if __name__ == "__main__":
    main()
