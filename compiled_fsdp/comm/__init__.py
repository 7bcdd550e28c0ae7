"""What graphs and eager code share: collectives as tensor operations, how gradients are reduced, what is counted.
It knows no parameter and no graph.
"""
