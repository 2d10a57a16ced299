"""What tests read programs with: compiled text, jaxprs, other machines."""
