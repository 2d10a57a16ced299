"""Weight maps of model families, from their config.json."""
