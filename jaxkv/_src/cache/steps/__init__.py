"""Steps that several verbs share: find a prefix, reserve pages, publish."""
