"""Find the parts that need float32: :func:`jaxmp.inspect.tune`.

- ``tune.py``: the function and its report
- ``candidates.py``: what the search can switch to float32, and the overrides that do it
- ``measurement.py``: the errors of a loss and its gradients, relative to float32
- ``search.py``: the search for a small set of overrides
"""
