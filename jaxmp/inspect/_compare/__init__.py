"""Measure how a policy, or another program, changes the numbers: :func:`jaxmp.inspect.compare`.

- ``compare.py``: the function and its report
- ``run.py``: a run of one program that records its values and gradients
- ``rows.py``: the values of both programs, matched, and their differences
- ``entry.py``: the scope where the error enters
"""
