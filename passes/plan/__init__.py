"""Plans: plain data that can be printed, saved and compared, and how they are made from a graph's tasks.
No torch.fx here.
"""

from compiled_fsdp.passes.plan.plan import Bucket, GraphPlan, Read

__all__ = ["Bucket", "GraphPlan", "Read"]
