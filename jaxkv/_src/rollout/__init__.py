"""The jitted generation loop."""
