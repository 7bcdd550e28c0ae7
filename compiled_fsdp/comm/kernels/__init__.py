"""Triton kernels that copy into a bucket and out of it, as ops; on the CPU the same by torch's operations."""
