"""The Dynamo backend, and what a compile asks of the user, the machine and the other ranks.
The passes over its graphs are in ``passes``.
"""
