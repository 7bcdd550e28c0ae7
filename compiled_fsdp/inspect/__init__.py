"""What the compiler did: reports of compiled graphs, log lines, and ``explain``."""
