"""Messages between ranks through the process group's key-value store, while they compile or if their code differs.

No file in here calls a collective.
"""
