"""What bucket kernels, a compiled step and its host time cost on this machine's GPU: ``python -m bench.gpu --json FILE``."""
