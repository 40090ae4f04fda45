"""Reads programs and runs: which precision ran where, what underflows, what broke, and what memory and time it takes.

Nothing else of jaxmp depends on it, and ``import jaxmp`` does not load it: ``import jaxmp.inspect``.
"""

from jaxmp.inspect.auditing import Audit as Audit
from jaxmp.inspect.auditing import AuditError as AuditError
from jaxmp.inspect.auditing import Product as Product
from jaxmp.inspect.auditing import audit as audit
from jaxmp.inspect.findings import Finding as Finding
from jaxmp.inspect.memory import Memory as Memory
from jaxmp.inspect.memory import memory as memory
from jaxmp.inspect.roofline import Roofline as Roofline
from jaxmp.inspect.roofline import roofline as roofline
from jaxmp.inspect.blame import Blame as Blame
from jaxmp.inspect.blame import first_nonfinite as first_nonfinite
from jaxmp.inspect.compare import Comparison as Comparison
from jaxmp.inspect.compare import compare as compare
from jaxmp.inspect.numerics import Numerics as Numerics
from jaxmp.inspect.numerics import numerics as numerics
from jaxmp.inspect.statistics import Statistics as Statistics
from jaxmp.inspect.watch import Watch as Watch
