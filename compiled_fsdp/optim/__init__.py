"""Optimizers that need whole matrices, although each rank holds a part of each.

They work on any DTensor parameters, those of torch's own ``fully_shard`` included.
"""
