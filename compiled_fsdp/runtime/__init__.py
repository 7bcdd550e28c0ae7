"""What happens between graphs: gathers and reductions in flight, gradients on their way to ``.grad``."""
