"""Write a page about a training run, as one HTML file that needs no network."""

from jaxmp.inspect.report.page import write_report

__all__ = ["write_report"]
