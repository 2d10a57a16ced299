"""vLLM's names for the one manager; see `jaxkv.host.vllm`."""
