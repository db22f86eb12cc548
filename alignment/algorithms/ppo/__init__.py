"""Proximal policy optimization: setup, rollouts, and the iteration itself."""
