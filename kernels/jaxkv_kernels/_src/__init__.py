"""The implementation; users import from `jaxkv_kernels`."""
