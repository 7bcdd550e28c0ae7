"""Random training programs, judged against FSDP2 and against the unsharded model: `python -m tests.fuzz`."""
