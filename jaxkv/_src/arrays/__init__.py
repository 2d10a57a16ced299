"""Array operations and checks of arguments, shared by all packages."""
