"""Kernels that copy between a bucket and its tensors: one launch, however many tensors there are."""
