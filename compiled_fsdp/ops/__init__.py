"""The custom ops that graphs hold: reads of sharded parameters, and reductions of their gradients.

This folder has the ops' schemas, implementations, fake implementations (shapes and dtypes) and backward.
"""
