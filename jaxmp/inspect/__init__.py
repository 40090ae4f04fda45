"""Reads programs and runs: which precision ran where, what underflows, what broke, and what memory and time it takes.

Nothing else of jaxmp depends on it, and ``import jaxmp`` does not load it: ``import jaxmp.inspect``.
"""

from jaxmp.inspect.auditing import Audit
from jaxmp.inspect.auditing import AuditError
from jaxmp.inspect.auditing import Product
from jaxmp.inspect.auditing import audit
from jaxmp.inspect.blame import Blame
from jaxmp.inspect.blame import first_nonfinite
from jaxmp.inspect.comparing import Comparison
from jaxmp.inspect.comparing import compare
from jaxmp.inspect.findings import Finding
from jaxmp.inspect.measuring import Numerics
from jaxmp.inspect.measuring import numerics
from jaxmp.inspect.memory_plan import Memory
from jaxmp.inspect.memory_plan import memory
from jaxmp.inspect.prediction import Roofline
from jaxmp.inspect.prediction import roofline
from jaxmp.inspect.statistics import Statistics
from jaxmp.inspect.watch import Watch

__all__ = [
    "Audit",
    "AuditError",
    "Blame",
    "Comparison",
    "Finding",
    "Memory",
    "Numerics",
    "Product",
    "Roofline",
    "Statistics",
    "Watch",
    "audit",
    "compare",
    "first_nonfinite",
    "memory",
    "numerics",
    "roofline",
]
