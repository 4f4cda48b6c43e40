"""The report: one HTML page that opens offline, written at the end of a run or live while it runs.

page.py puts it together from sections.py (one run: with calibration, overlays) and
comparison_section.py (several runs); html, charts, strips and tabular draw; live_view.py serves it.
catalogue.py has tables of methods, objectives and networks for the command line.
"""

from wardround.reporting.page import ReportSource, build_page, open_source, write_report

__all__ = ["ReportSource", "build_page", "open_source", "write_report"]
