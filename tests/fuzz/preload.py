"""What ranks that compile by Inductor have found out when they start: what the processor can do, and Triton's key."""

from torch._inductor.codecache import CacheBase
from torch._inductor.cpu_vec_isa import pick_vec_isa

pick_vec_isa()
CacheBase.get_system()
