"""Collectives outside of graphs, and gradients on their way to ``.grad``.
``context.py`` has the only global object, ``RUNTIME``. Every other module is a part of it or works on it.
"""
