"""The costs of compute and collectives on given hardware.
Times are seconds and sizes are bytes; symbolic sizes give sympy expressions.
"""

from compiled_fsdp.passes.cost.hardware import Contention, CopyEngines, Curve, Hardware, LowLatency, Wires
from compiled_fsdp.passes.cost.profiles import PROFILES, profile_of

__all__ = ["PROFILES", "Contention", "CopyEngines", "Curve", "Hardware", "LowLatency", "Wires", "profile_of"]
