"""Scan a checkpoint and draw it: which layers are more symmetric than random weights of their size would be?

python examples/scan_and_plot.py [a file, a folder, a hub id, or sample:NAME]
"""

import sys
from pathlib import Path

import qkform as qk

source = sys.argv[1] if len(sys.argv) > 1 else "sample:minilm"
table = qk.scan(source)

print(f"{source}: symmetry of each layer, and its distance from random weights in standard deviations")
for row in table.layers:
    if row["attention"] == "self":
        print(f"  {row['module']:<40} {row['symmetry']:+.3f}  {row['symmetry_z']:+7.1f}")

beyond = [row for row in table.layers if row["symmetry_z"] is not None and abs(row["symmetry_z"]) > 2]
print(f"{len(beyond)} of {len(table.layers)} layers are more than two standard deviations away")

charts = qk.report.save_plots(table, Path("charts"), formats=("svg",))
print(f"{len(charts)} charts are in charts/, the first is {charts[0].name}")
