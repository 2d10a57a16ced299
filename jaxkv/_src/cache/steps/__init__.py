"""What several verbs do to the state: find a prefix, reserve pages, publish."""
