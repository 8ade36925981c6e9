"""Draw docs/overview.png from the two sample models: python docs/overview.py"""

from pathlib import Path

import vl_convert

import qkform as qk
from qkform.report import charts


def main() -> None:
    rows = [row for name in ("sample:minilm", "sample:smollm2") for row in qk.scan(name).rows]
    chart = charts.plane(rows, width=560, height=380)
    png = vl_convert.vegalite_to_png(chart.properties(background="white").to_json(), scale=2)
    Path(__file__).with_name("overview.png").write_bytes(png)


if __name__ == "__main__":
    main()
