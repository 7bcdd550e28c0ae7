"""The ops of a graph: what a read of a sharded parameter is, and what becomes of its gradient.
What they are, do and return, and what their backward is; nobody else knows the order of their arguments.
"""
