"""Triton kernels that copy tensors into a bucket and out of it, as ops; on the CPU torch's own operations do it.
They know tensors and places alone: which buckets they copy is decided in ``passes``.
"""
