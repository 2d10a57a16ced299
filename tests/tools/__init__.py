"""Tools of tests: compiled programs, jaxprs, mutants and other machines."""
