"""Find the parts that need float32: :func:`jaxmp.inspect.tune`.

- ``tune.py``: the function and its report
- ``measurement.py``: the errors of a loss and its gradients, relative to float32
- ``search.py``: the search for a small set of overrides
- ``rounded_products.py``: products with half operands in a program that is otherwise float32
"""
