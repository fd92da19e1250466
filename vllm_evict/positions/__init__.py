"""Rotary positions that are moved down, so that a stream never leaves the length its model was made for."""
