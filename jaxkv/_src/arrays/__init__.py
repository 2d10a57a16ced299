"""Array operations and argument checks shared by all packages."""
