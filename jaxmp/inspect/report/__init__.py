"""A page on a training run: one HTML file without any request to a network."""

from jaxmp.inspect.report.page import write_report

__all__ = ["write_report"]
