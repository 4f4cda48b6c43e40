"""The report: one HTML file that opens offline from a double click.

facts.py      what run and comparison folders say
html.py       text that cannot become markup
charts.py     small SVG charts; strips.py: one dot a case
tabular.py    tables one can sort
overlays.py   scans with outlines, and where the model was unsure
sections.py   one run: curves, weights, losses, cases, pictures, calibration, traffic, trouble
calibration.pywhether it is sure when it should be, from calibration.json
heterogeneity.py   how the clients' data differ
groups.py     which runs stand together, from folders on disk
verdict.py    the result in a few sentences
compared.py   several runs: the headline
colophon.py   configuration, environment, how to cite
page.py       all of it on one page, with report.css, report.js and page.html
"""

from wardround.reporting.page import build_page, write_report
from wardround.reporting.sources import ReportSource, open_source

__all__ = ["ReportSource", "build_page", "open_source", "write_report"]
