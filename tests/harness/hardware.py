"""Hardware descriptions with which the planner makes choices that it would not make for this machine."""

from dataclasses import replace

from compiled_fsdp.passes.cost import PROFILES, Curve

# A reduce-scatter counts as quick as an all-to-all, so that the planner does not take the all-to-all. gloo's own moves
# twice the bytes, and there the planner takes the all-to-all.
SCATTERING = replace(PROFILES["cpu"], reduce_moves=1.0)
# The all-to-all has a measured curve.
EXCHANGING = replace(PROFILES["cpu"], alltoall={(2, 1): Curve(300e-6, 4e9, 300e-6)})
# A further tensor in a collective costs nothing, so that the planner copies no tensors together.
GROUPING = replace(EXCHANGING, each=0.0)
