"""Draw the pictures of docs/theory.md: python docs/theory.py"""

from pathlib import Path
from tempfile import TemporaryDirectory

import altair as alt
import numpy as np
import vl_convert

from qkform.dynamics.one_layer import Flow
from qkform.report import save_plots
from qkform.report.look import MODEL_COLOURS, finished

HERE = Path(__file__).parent
CIRCUITS = {
    "both collapsed": ("collapsed", "collapsed"),
    "output factorized": ("collapsed", "factorized"),
    "attention factorized": ("factorized", "collapsed"),
    "both factorized": ("factorized", "factorized"),
}


def main() -> None:
    with TemporaryDirectory() as folder:
        save_plots(Flow().table([1 / 16, 1 / 4, 1, 4, 16], 0.1), folder, ["png"])
        (HERE / "theory-line.png").write_bytes((Path(folder) / "flow-phase-plane.png").read_bytes())
    (HERE / "theory-sharpness.png").write_bytes(
        vl_convert.vegalite_to_png(sharpness().to_dict(validate=False), scale=2)
    )


def sharpness() -> alt.LayerChart:
    """Sharpness at a cross-entropy of 0.1 against the ratio, for the four parameterizations."""
    rows = [
        {"name": name, "ratio": float(ratio), "sharpness": flow.closed_form(float(ratio), 0.1).sharpness}
        for name, (attention, output) in CIRCUITS.items()
        for flow in [Flow(attention=attention, output=output)]
        for ratio in np.geomspace(1 / 16, 16, 80)
    ]
    ticks = [1 / 16, 1 / 4, 1, 4, 16]
    x = alt.X(
        "ratio:Q",
        title="ratio of learning rates, W_QK over W_OV",
        scale=alt.Scale(type="log", domain=[ticks[0], ticks[-1]], nice=False),
        axis=alt.Axis(format="~r", values=ticks, domain=False, grid=False),
    )
    y = alt.Y(
        "sharpness:Q",
        title="attention on the relevant token",
        scale=alt.Scale(domain=[0, 1]),
        axis=alt.Axis(format="~g", tickCount=5, domain=False),
    )
    scale = alt.Scale(domain=list(CIRCUITS), range=list(MODEL_COLOURS[: len(CIRCUITS)]))
    legend = alt.Legend(title=None, orient="top", symbolType="stroke", symbolStrokeWidth=3)
    lines = (
        alt.Chart()
        .mark_line(strokeWidth=2)
        .encode(x=x, y=y, color=alt.Color("name:N", scale=scale, legend=legend))
    )
    chart = finished(alt.layer(lines), alt.InlineData(values=rows), "Sharpness against the ratio", 640, 320)
    return chart.properties(background="white", padding=16)


if __name__ == "__main__":
    main()
