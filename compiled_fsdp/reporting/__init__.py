"""The reports of compiled graphs, and log lines about them. No decision is made here."""
