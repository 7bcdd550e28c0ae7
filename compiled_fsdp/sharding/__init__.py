"""Static facts: meshes, process groups, the layout and dtypes of each parameter, and the modules that repeat.

Nothing here changes while a model trains.
"""
