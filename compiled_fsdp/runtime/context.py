"""``RUNTIME``, the one object of a process that holds all collectives and gradients in flight between graphs."""

from __future__ import annotations

from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.runtime.reducer import GradReducer
from compiled_fsdp.runtime.saved_tensors import SavedTensors


class Runtime:
    """The gathers and reductions in flight, and the active saved-tensor hooks."""

    def __init__(self) -> None:
        self.prefetcher = AllGatherPrefetcher()
        self.reducer = GradReducer(self.prefetcher)
        self.follower = self.reducer.follower
        self.saved_tensors = SavedTensors()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight.

        True between steps, and after a failed forward or backward was closed.
        """
        return self.prefetcher.idle and self.reducer.idle and self.saved_tensors.idle

    def reset(self) -> None:
        """End everything in flight, as after a forward and a backward. Must not be called inside of a backward."""
        self.saved_tensors.stop()
        self.prefetcher.close()
        self.prefetcher.drop()
        self.follower.end_forward()
        self.reducer.close_failed()


RUNTIME = Runtime()
