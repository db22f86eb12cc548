"""Proximal policy optimisation: setup, rollouts, and the iteration itself."""
