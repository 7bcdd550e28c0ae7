"""The one object of a process that holds what is in flight between graphs, of all its models."""

from __future__ import annotations

from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.runtime.reducer import GradReducer
from compiled_fsdp.runtime.saved_tensors import SavedTensors


class Runtime:
    """Gathers, reductions and hooks of saved tensors that are not done."""

    def __init__(self) -> None:
        self.prefetcher = AllGatherPrefetcher()
        self.reducer = GradReducer(self.prefetcher)
        self.follower = self.reducer.follower
        self.saved_tensors = SavedTensors()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight.

        It is so between steps, and after a forward or backward that failed and was closed.
        """
        return self.prefetcher.idle and self.reducer.idle and self.saved_tensors.idle

    def reset(self) -> None:
        """End what is in flight, as after a forward and a backward.

        It is not to be called inside of a backward.
        """
        self.saved_tensors.stop()
        self.prefetcher.close()
        self.follower.end_forward()
        self.reducer.close_failed()


RUNTIME = Runtime()
