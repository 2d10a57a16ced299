"""What each family's config.json and tensors mean."""
