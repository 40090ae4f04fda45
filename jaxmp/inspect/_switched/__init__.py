"""Run a program with each of its roundings behind a switch.

``jaxmp.inspect.error_budget`` and ``jaxmp.inspect.tune`` use this package. README.md explains the design.

- ``gradient_program.py``: the program of a function, or of a loss with its gradients
- ``operations.py``: the operations of a program, with the equations that JAX makes from each of them
- ``sites.py``: the roundings in a program
- ``rounding.py``: rounding behind a switch
- ``evaluation.py``: the program in a wider dtype, with a switch at each rounding
- ``stepping.py``: the compiled equations of the program, run one at a time
- ``switched.py``: runs of the program with some of its roundings, and their errors
"""
