"""Tools that inspect programs and runs.

The tools report precision, underflow, rounding errors, the first infinity or NaN, memory, communication and time.
``import jaxmp`` does not load the tools: write ``import jaxmp.inspect``.
"""

from jaxmp.base.formats import formats
from jaxmp.inspect import plots
from jaxmp.inspect._audit.audit import Audit, AuditError, audit
from jaxmp.inspect._audit.findings import Finding
from jaxmp.inspect._audit.products import Product
from jaxmp.inspect._budget.budget import BudgetTotal, ErrorBudget, error_budget
from jaxmp.inspect._budget.measurement import BudgetGroup
from jaxmp.inspect._compare.compare import Comparison, compare
from jaxmp.inspect._first_nonfinite.first_nonfinite import Blame, first_nonfinite
from jaxmp.inspect._fit.combinations import Trial
from jaxmp.inspect._fit.fit import Fit, fit
from jaxmp.inspect._memory.memory import Memory, memory
from jaxmp.inspect._numerics.numerics import Numerics, numerics
from jaxmp.inspect._profile.kernel_rows import ProfileRow
from jaxmp.inspect._profile.profile import Profile, profile
from jaxmp.inspect._roofline.roofline import Roofline, roofline
from jaxmp.inspect._tune.tune import Tuned, tune
from jaxmp.inspect._watch.watch import Watch
from jaxmp.inspect.compiled.collectives import Collectives
from jaxmp.inspect.counts.statistics import Statistics

__all__ = [
    "Audit",
    "AuditError",
    "Blame",
    "BudgetGroup",
    "BudgetTotal",
    "Collectives",
    "Comparison",
    "ErrorBudget",
    "Finding",
    "Fit",
    "Memory",
    "Numerics",
    "Product",
    "Profile",
    "ProfileRow",
    "Roofline",
    "Statistics",
    "Trial",
    "Tuned",
    "Watch",
    "audit",
    "compare",
    "error_budget",
    "first_nonfinite",
    "fit",
    "formats",
    "memory",
    "numerics",
    "plots",
    "profile",
    "roofline",
    "tune",
]
