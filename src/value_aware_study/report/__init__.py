"""The one page of the report: what an exhibit is, how it looks, and the writer of the page."""

from value_aware_study.report.exhibit import Exhibit, Page, Section, Table
from value_aware_study.report.page import write_page

__all__ = ["Exhibit", "Page", "Section", "Table", "write_page"]
