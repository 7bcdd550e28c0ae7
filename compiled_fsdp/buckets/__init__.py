"""Packing, sending, reducing, encoding and unpacking of buckets as tensor operations, for graphs and for eager code.
The functions take tensors and specs. They know neither parameter objects nor graphs.
"""
