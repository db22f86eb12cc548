"""Recipes: stages in order, their files, and what is expected of them."""
