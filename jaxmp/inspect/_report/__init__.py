"""Write a page about a training run: :func:`jaxmp.inspect.write_report`.

- ``report.py``: the function, which fills the template ``page.html``
- ``reading.py``: the folders of runs
- ``charts.py``: the charts of the page
"""
