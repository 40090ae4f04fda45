"""Reads programs and runs: which precision ran where, what underflows, what broke, and what memory and time it takes.

Nothing else of jaxmp depends on it, and ``import jaxmp`` does not load it: ``import jaxmp.inspect``.
"""

from jaxmp.inspect.auditing import Audit as Audit
from jaxmp.inspect.auditing import AuditError as AuditError
from jaxmp.inspect.auditing import Product as Product
from jaxmp.inspect.auditing import audit as audit
from jaxmp.inspect.blame import Blame as Blame
from jaxmp.inspect.blame import first_nonfinite as first_nonfinite
from jaxmp.inspect.comparing import Comparison as Comparison
from jaxmp.inspect.comparing import compare as compare
from jaxmp.inspect.findings import Finding as Finding
from jaxmp.inspect.measuring import Numerics as Numerics
from jaxmp.inspect.measuring import numerics as numerics
from jaxmp.inspect.memory_plan import Memory as Memory
from jaxmp.inspect.memory_plan import memory as memory
from jaxmp.inspect.prediction import Roofline as Roofline
from jaxmp.inspect.prediction import roofline as roofline
from jaxmp.inspect.statistics import Statistics as Statistics
from jaxmp.inspect.watch import Watch as Watch
