"""What the runtime reads and writes, as data: parameters, units, and which number stands for which of them.
No op, no collective and no hook starts here.
"""
