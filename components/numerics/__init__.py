"""Number formats: pure functions that encode and decode."""
