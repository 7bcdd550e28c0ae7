"""Static facts: meshes, process groups, how a parameter lies on them, in which dtypes, and which modules repeat.
Nothing here changes while a model trains.
"""
