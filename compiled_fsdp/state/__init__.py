"""The data that the runtime reads and writes: parameters, units, and the ``param_id`` by which graphs find them.
No op, no collective and no hook starts here.
"""
