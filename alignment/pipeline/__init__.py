"""Recipes: stages in order, run with their files, and the ranges expected of their results."""
