"""What people are told of compiled graphs: reports, log lines, verdicts, advice, timelines.
Nothing is decided here.
"""
