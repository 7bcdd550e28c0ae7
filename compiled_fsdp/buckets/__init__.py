"""What graphs and eager code share: how a bucket is packed, sent, reduced, encoded and unpacked, as tensor operations.
It knows no parameter and no graph.
"""
