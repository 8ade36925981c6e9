"""Records as a person looks at them: charts, files of charts, and one self-contained HTML page that works offline.

`write_page` and `page_html` make the page, `save_plots` the files; every chart on its own is in
`qkform.report.charts` (one model), `qkform.report.paths` (steps, distances) and `qkform.report.changes`
(differences). Models that belong together are found by `qkform.report.series.entries`. `RunSet.read` takes the
records of training runs; their charts are in `qkform.report.runcharts`.
"""

from qkform.report.page import page_html, write_page
from qkform.report.plots import save_plots
from qkform.report.runset import RunSet

__all__ = ["RunSet", "page_html", "save_plots", "write_page"]
