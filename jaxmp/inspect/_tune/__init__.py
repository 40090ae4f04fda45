"""Find the parts that need float32: :func:`jaxmp.inspect.tune`.

- ``tune.py``: the function and its report
- ``candidates.py``: what the search can switch to float32, and the overrides that do it
- ``measurement.py``: the errors of a loss and its gradients, relative to float32
- ``prediction.py``: the errors under overrides, with one compiled program for all overrides
- ``search.py``: the search for a small set of overrides
- ``trials.py``: the errors that the search takes: predicted, or measured
- ``rounded_products.py``: products with rounded operands in a program that is otherwise float32
"""
