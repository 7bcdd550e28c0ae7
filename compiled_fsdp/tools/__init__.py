"""Tools for people who look at compiled models: the command, ``explain``, advice, profiles, timelines, tables.

No other folder imports this one.
"""
