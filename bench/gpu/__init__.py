"""Times of bucket kernels, of a compiled step and of its host work on this GPU: ``python -m bench.gpu --json FILE``."""
