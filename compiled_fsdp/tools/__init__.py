"""What people look at compiled models with: the command, `explain`, advice, profiles, timelines, tables.

No other folder imports it.
"""
