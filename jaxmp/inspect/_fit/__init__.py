"""Find the fastest way to make a train step fit into a GPU's memory: :func:`jaxmp.inspect.fit`.

``combinations.py`` chooses which combinations of rematerialisation and microbatches to compile.
"""
