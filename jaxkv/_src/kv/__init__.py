"""The K/V memory."""
