"""The classes of EasyDeL eSurge's cache manager, over the one manager."""
