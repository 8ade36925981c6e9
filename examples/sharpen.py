"""How sharp does attention become when the query-key weights learn faster? One layer, solved, against a simulation.

Trains nothing large: the closed form says where training ends for a ratio of learning rates, and the gradient flow of
the full matrices, integrated until the same loss, says whether that is so. Needs the extra `theory` (scipy).
"""

from qkform.dynamics.one_layer import Flow

LOSS = 0.1
flow = Flow(attention="collapsed", output="collapsed")

print(f"sharpness of attention when the loss is {LOSS}")
print("qk_lr_ratio  closed form  simulated")
largest = 0.0
for ratio in (1 / 4, 1, 4, 16):
    solved, simulated = flow.closed_form(ratio, LOSS), flow.simulate(ratio, LOSS)
    largest = max(largest, abs(simulated.sharpness / solved.sharpness - 1))
    print(f"{ratio:11g}  {solved.sharpness:11.4f}  {simulated.sharpness:9.4f}")
print(f"they differ by {largest:.1e} at most, relative")

wanted = 0.8
ratio = flow.ratio_for(wanted, LOSS)
print(f"backwards: a sharpness of {wanted} takes qk_lr_ratio {ratio:.3g}; qk.surgery.param_groups takes it")
print("in a real model under Adam the number is another one, the order is the same: see docs/theory.md")
