"""The training step around a compiled model: microbatches, clipping, and the optimizer's update."""
