"""What ranks tell each other through the process group's key-value store while they compile, or where their code
differs; never by a collective."""
