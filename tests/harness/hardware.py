"""Hardware that makes the planner choose what it would not choose for this machine."""

from dataclasses import replace

from compiled_fsdp.passes.cost import PROFILES, Curve

# A reduction is said to be as quick as an all-to-all, which then is not taken (on gloo it is taken else).
SCATTERING = replace(PROFILES["cpu"], reduce_moves=1.0)
# The all-to-all is measured.
EXCHANGING = replace(PROFILES["cpu"], alltoall={(2, 1): Curve(300e-6, 4e9, 300e-6)})
# A further tensor in a collective costs nothing, so nothing is copied together.
GROUPING = replace(EXCHANGING, each=0.0)
