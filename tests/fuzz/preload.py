"""Facts that ranks know at their start, so that Inductor need not find them out: the vector ISA, and Triton's key."""

from torch._inductor.codecache import CacheBase
from torch._inductor.cpu_vec_isa import pick_vec_isa

pick_vec_isa()
CacheBase.get_system()
