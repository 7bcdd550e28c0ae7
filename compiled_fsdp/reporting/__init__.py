"""What people are told of compiled graphs: reports, log lines, ``explain``.
Nothing is decided here.
"""
