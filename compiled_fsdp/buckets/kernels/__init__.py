"""Triton kernels that copy tensors into a bucket and out of it, as ops; on the CPU torch's own operations do it.
They know only tensors and places. The passes decide which buckets they copy.
"""
