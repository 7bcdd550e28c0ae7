"""Changes to a module: the sharding call, the module's class and methods, its hooks, and how it reads parameters.
All that a user calls on a module begins here.
"""
