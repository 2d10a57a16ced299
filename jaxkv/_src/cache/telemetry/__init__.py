"""What observers read from a cache: events, page ages, new pages."""
