"""Where phases and iterations begin and end, and whose they are."""
