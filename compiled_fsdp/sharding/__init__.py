"""Static facts: meshes, process groups, how a parameter lies on them, in which dtypes, and what repeats.
Nothing here changes while a model trains.
"""
