"""Messages between ranks through the process group's key-value store, and the detection of ranks that have ended.

Nothing in here launches a collective, so ranks may say different things at different times.
"""
