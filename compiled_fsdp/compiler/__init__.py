"""The Dynamo backend, and the questions that a compile asks the user, the machine and the other ranks.

The passes over the backend's graphs are in ``passes``.
"""
