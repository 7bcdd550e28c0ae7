"""What happens between graphs: gathers and reductions in flight, and gradients on their way to ``.grad``.
``context.py`` has the one object that holds all of it; everything else here is a part of that object or works on it.
"""
