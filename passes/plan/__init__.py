"""Plans, which are plain data that can be printed, saved and compared, and the planner that makes them from a graph's
tasks. Nothing here uses torch.fx.
"""

from compiled_fsdp.passes.plan.plan import Bucket, GraphPlan, Read

__all__ = ["Bucket", "GraphPlan", "Read"]
