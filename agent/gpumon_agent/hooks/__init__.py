"""Where phases and iterations begin and end, and which model they belong to."""
