"""Device meshes of a test's ranks."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh_2d(outer: str, inner: str) -> DeviceMesh:
    """Return a mesh of four ranks, two along each dimension."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(outer, inner))
