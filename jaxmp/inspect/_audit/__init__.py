"""Report the precision of products and findings: :func:`jaxmp.inspect.audit`.

- ``audit.py``: the function and its report
- ``products.py``: the matrix products and convolutions of the program
- ``findings.py``: the kinds of findings, and the finder of each kind
- ``finders/``: the finders, one file for each subject
- ``evidence.py``: the facts about the program that the finders use
- ``arguments.py``: the kinds of the arguments: params, batch and so on
- ``weight_operands.py``: which operand of a product is its weight
- ``compiled.py``: the traced products and casts in the compiled program
"""
