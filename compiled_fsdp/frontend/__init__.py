"""What changes on a module: the sharding call, its class and methods, its hooks, and how it reads parameters.
All that a user calls on a module begins here.
"""
