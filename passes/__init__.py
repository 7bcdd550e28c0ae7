"""Graph passes, with the planner (``plan/``) and the cost model (``cost/``); ``pipeline.py`` is the table of contents.
They work on graphs and plain data, and know neither modules nor processes.
"""
