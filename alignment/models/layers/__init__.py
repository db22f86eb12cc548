"""The parts of a transformer, one file each: the spec that describes a part stands beside the module it builds."""
