"""Plain types that every layer shares; imports nothing of rocserve."""
