"""Tests of `jaxkv.host.vllm`."""
