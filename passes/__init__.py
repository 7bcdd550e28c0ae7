"""Graph passes, and the plans and costs that they go by; ``pipeline.py`` is the table of contents.
They know graphs and plain data: no module, no process.
"""
