"""Graph passes. They know ops and plans, nothing of modules or processes; ``pipeline.py`` is the table of contents."""
