"""What the runtime reads and writes, as data: parameters, units, and who has which number. No op and no
collective starts here.
"""
