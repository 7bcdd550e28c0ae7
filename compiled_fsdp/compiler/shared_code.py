"""Compiled code that equal layers share: which parameters it is called with, for reports and the user's own buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from compiled_fsdp.comm import watch
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.compiler.user_buckets import check_same_buckets
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.runtime.context import RUNTIME


def noting_parameters(
    code: Callable[..., Any], region: Region, reports: list[GraphReport], options: Options
) -> Callable[..., Any]:
    """``code`` that notes in its graphs' reports which parameters it is called with: equal layers share it."""
    if region.id_input is None:
        return code
    place, position = region.id_input
    reads, compiled_for, patterns = region.reads, region.param_ids, options.bucket
    noted: dict[int, weakref.ref[Any]] = {}  # by id(), which another model's tensor may get later

    def run(*args: Any) -> Any:
        RUNTIME.saved_tensors.stop()
        tensor = args[place]
        if (watcher := watch.current()) is not None:
            watcher.call_for(int(tensor[position]))
        known = noted.get(id(tensor))
        if known is None or known() is not tensor:
            param_id = int(tensor[position])
            if param_id not in compiled_for:
                check_same_buckets(patterns, reads, param_id)
            noted[id(tensor)] = weakref.ref(tensor)
            for report in reports:
                report.param_ids |= {param_id}
                report.first_params |= {param_id}
        return code(*args)

    return run
