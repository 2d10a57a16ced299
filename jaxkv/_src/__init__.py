"""The implementation. Import from `jaxkv` and its public modules instead."""
