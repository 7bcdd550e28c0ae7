"""What bucket kernels, a compiled step and its host time cost on this GPU: ``python -m bench.gpu --json FILE``."""
