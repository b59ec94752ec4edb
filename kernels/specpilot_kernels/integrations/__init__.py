"""W12 in other people's engines. Importing a module here registers the format with its engine."""
