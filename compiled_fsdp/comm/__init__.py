"""What graphs and eager code share: collectives as tensor operations, how gradients are reduced, copies into
buckets, what a step communicates. It knows no parameter and no graph.
"""
