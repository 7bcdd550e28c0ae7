"""Optimizers of sharded parameters: on this rank's shards, or on whole matrices that one rank computes.

They work on any DTensor parameters, those of torch's own ``fully_shard`` included.
"""
