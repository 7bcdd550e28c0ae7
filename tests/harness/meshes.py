"""Meshes of the ranks of a test."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh_2d(outer: str, inner: str) -> DeviceMesh:
    """Four ranks, two along each dimension."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(outer, inner))
