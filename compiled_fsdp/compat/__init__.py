"""The only folder that imports private names of torch.

Each function wraps one thing that is not public, or that differs between torch 2.11 and 2.15.
"""

from compiled_fsdp.compat.versions import check_version

check_version()
