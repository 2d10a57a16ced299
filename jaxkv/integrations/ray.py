"""Workers of a `jaxkv.workers.Pool` as Ray actors; extra `ray`."""

from jaxkv._src.integrations.ray_workers import RayWorkers

__all__ = ["RayWorkers"]
