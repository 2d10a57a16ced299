"""The classes of vLLM's cache manager; see `jaxkv.host.vllm`."""
