"""Tools that inspect programs and runs.

The tools report precision, underflow, rounding errors, the first infinity or NaN, memory, communication and time.
``import jaxmp`` does not load the tools: write ``import jaxmp.inspect``.
"""

from jaxmp.base.formats import formats
from jaxmp.inspect._profile.kernel_rows import ProfileRow
from jaxmp.inspect._profile.profiling import Profile, profile
from jaxmp.inspect.audit_products import Product
from jaxmp.inspect.auditing import Audit, AuditError, audit
from jaxmp.inspect.blame import Blame, first_nonfinite
from jaxmp.inspect.comparing import Comparison, compare
from jaxmp.inspect.measuring import Numerics, numerics
from jaxmp.inspect.memory_plan import Memory, memory
from jaxmp.inspect.prediction import Roofline, roofline
from jaxmp.inspect.program.findings import Finding
from jaxmp.inspect.program.statistics import Statistics
from jaxmp.inspect.recording import Record, record
from jaxmp.inspect.report import write_report
from jaxmp.inspect.traffic import Collectives, collectives, ideal_wire
from jaxmp.inspect.tuning import Tuned, tune
from jaxmp.inspect.watch import Watch

__all__ = [
    "Audit",
    "AuditError",
    "Blame",
    "Collectives",
    "Comparison",
    "Finding",
    "Memory",
    "Numerics",
    "Product",
    "Profile",
    "ProfileRow",
    "Record",
    "Roofline",
    "Statistics",
    "Tuned",
    "Watch",
    "audit",
    "collectives",
    "compare",
    "first_nonfinite",
    "formats",
    "ideal_wire",
    "memory",
    "numerics",
    "profile",
    "record",
    "roofline",
    "tune",
    "write_report",
]
