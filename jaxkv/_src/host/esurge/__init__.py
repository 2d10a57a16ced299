"""The classes of EasyDeL eSurge's cache manager; see `jaxkv.host.esurge`."""
