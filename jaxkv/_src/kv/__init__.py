"""The K/V memory; users import from `jaxkv.kv`."""
