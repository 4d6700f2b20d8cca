"""The op."""
