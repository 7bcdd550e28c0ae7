"""What bucket kernels, a compiled step and its host time cost on the GPU at hand: ``python -m bench.gpu --json FILE``."""
