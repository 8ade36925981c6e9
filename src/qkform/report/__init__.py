"""Records as a person looks at them: charts, and one self-contained HTML page that works offline.

`write_page` and `page_html` make the page; `qkform.report.charts` has every chart on its own.
"""

from qkform.report.page import page_html, write_page

__all__ = ["page_html", "write_page"]
