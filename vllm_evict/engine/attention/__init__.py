"""Attention backends that read resident pages and report page mass."""
