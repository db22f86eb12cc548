"""Stage configs: YAML with line numbers, overrides, validation."""
