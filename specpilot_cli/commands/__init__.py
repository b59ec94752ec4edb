"""Terminal side of each subcommand: parse, call one function, render."""
