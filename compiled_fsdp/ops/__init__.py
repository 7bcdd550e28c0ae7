"""The ops of a graph: what a read of a sharded parameter is, and what becomes of its gradient.

``schema.py`` defines them, ``impl.py`` and ``fake.py`` say what they do with real tensors and with those that have no
memory, ``autograd.py`` what their backward is; ``calls.py`` calls them with what a parameter says.
"""
