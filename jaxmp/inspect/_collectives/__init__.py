"""Report what devices send each other: :func:`jaxmp.inspect.collectives`.

- ``collectives.py``: the function, its report, and :func:`jaxmp.inspect.ideal_wire`
- ``groups.py``: the groups of devices that a collective connects
"""
